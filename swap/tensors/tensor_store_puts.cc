// What goes into a store of named tensors: into host memory, into HBM, or past both to NVMe.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "swap/tensors/tensor_store_impl.h"

namespace spillway {
namespace {

constexpr std::uint64_t kDefaultBlock = 64 * kKiB;
constexpr std::uint64_t kWrittenBeside = 4 * kMiB;  // of a tensor that is written while it is copied, at a time

// Fills `to` with the next bytes of a tensor, and with zeros after its end, block by block; a checksum for each.
void copy_blocks(std::span<const std::byte> from, std::span<std::byte> to, std::uint64_t block_bytes,
                 std::uint64_t* checksums) {
  while (!to.empty()) {
    const auto block = to.first(std::min<std::uint64_t>(block_bytes, to.size()));
    const auto piece = from.first(std::min(block.size(), from.size()));
    std::ranges::copy(piece, block.begin());
    std::ranges::fill(block.subspan(piece.size()), std::byte{0});
    *checksums++ = granule_checksum(block);
    from = from.subspan(piece.size());
    to = to.subspan(block.size());
  }
}

}  // namespace

void take_checksums(std::span<const std::byte> bytes, std::uint64_t block_bytes, std::uint64_t* sums) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min<std::uint64_t>(block_bytes, bytes.size()))) {
    *sums++ = granule_checksum(bytes.first(std::min<std::uint64_t>(block_bytes, bytes.size())));
  }
}

void TieredTensors::check(const TensorToPut& tensor) const {
  if (tensor.name.empty()) refuse_tensor("tensor", "has no name", "name it");
  if (tensor.block_bytes > staging_.bytes)
    refuse_tensor(tensor.name, fmt::format("has blocks of {} bytes", tensor.block_bytes),
                  fmt::format("at most {} with these host_bytes", staging_.bytes));
  const auto found = names_.find(tensor.name);
  if (found == names_.end()) return;
  if (found->second->hbm.pins > 0) refuse_pinned(tensor.name);
  const TensorRecord& record = found->second->record;
  if (record.shape == tensor.shape && record.bytes == tensor.data.size()) return;
  refuse_tensor(tensor.name,
                fmt::format("is {} of {} bytes here, and {} of {} bytes was given", to_string(record.shape),
                            record.bytes, to_string(tensor.shape), tensor.data.size()),
                "remove it first, or give the new one another name");
}

TieredTensors::Value TieredTensors::make_value(const TensorToPut& tensor) const {
  auto value = std::make_shared<TensorValue>();
  value->name = tensor.name;
  value->record.shape = tensor.shape;
  value->record.bytes = tensor.data.size();
  value->record.block_bytes = align_up(tensor.block_bytes == 0 ? kDefaultBlock : tensor.block_bytes, kTensorAlignment);
  value->record.checksums.resize(value->record.blocks());
  return value;
}

void TieredTensors::put(std::span<const TensorToPut> tensors) {
  refuse_twice(tensors, [](const TensorToPut& tensor) { return tensor.name; });
  Entry lock = enter();
  for (const TensorToPut& tensor : tensors) {
    check_place(tensor.memory);
    check(tensor);
  }
  for (const TensorToPut& tensor : tensors) {
    check(tensor);  // the mutex was free meanwhile, here and below
    if (tensor.memory == Placement::kHbm && put_in_hbm(tensor, lock)) continue;
    if (align_up(tensor.data.size(), kTensorAlignment) > host_.capacity) {
      put_on_nvme(tensor, lock);
    } else {
      tensor.memory == Placement::kHbm ? put_down_in_host(tensor, lock) : put_in_host(tensor, lock);
    }
  }
}

void TieredTensors::take_bytes(const TensorToPut& tensor, std::uint64_t at, std::span<std::byte> to,
                               TensorRecord& record) const {
  std::uint64_t* const sums = &record.checksums[at / record.block_bytes];
  const auto from = tensor.data.subspan(at);
  if (tensor.memory == Placement::kHost) return copy_blocks(from, to, record.block_bytes, sums);
  const std::size_t bytes = std::min(to.size(), from.size());
  HbmMemory::Copies down(*device_, CopyKind::kDeviceToHost, tensor.name, tensor.stream);
  down.add(to.data(), from.data(), bytes);
  down.finish();
  std::ranges::fill(to.subspan(bytes), std::byte{0});
  take_checksums(to, record.block_bytes, sums);
}

bool TieredTensors::put_in_hbm(const TensorToPut& tensor, Lock& lock) {
  const Value value = make_value(tensor);
  const std::uint64_t bytes = value->record.padded_bytes();
  // A name that is pinned in host memory stays there.
  const auto stays_below = [&] {
    const auto found = names_.find(tensor.name);
    return found != names_.end() && found->second->host.pins > 0;
  };
  if (bytes > hbm_.capacity || stays_below()) return false;
  const auto before = names_.find(tensor.name);
  bool instead = false;
  // What nobody looks at is overwritten where it lies, and is no more, unless another tier has it until all is well.
  if (before != names_.end() && before->second->hbm.at && !before->second->stays()) {
    const Value old = before->second;
    instead = !is_elsewhere(*old, hbm_);
    unplace(*old, hbm_);
    value->hbm.at = std::exchange(old->hbm.at, std::nullopt);
    place(old);
  } else {
    try {
      value->hbm.at = take_hbm(tensor.name, bytes, lock);
    } catch (const Error& full) {
      if (full.code() != Code::kDoesNotFit) throw;
      check(tensor);
      return false;
    }
  }
  if (instead) install(value);
  value->filling = true;
  const Arriving arriving(*this, hbm_);
  const auto over = [&] {
    value->filling = false;
    changed_->notify_all();
  };
  bool goes_below = false;
  try {
    {
      const Unlocked free(lock);
      HbmMemory::Copies copies(*device_, CopyKind::kDeviceToDevice, tensor.name, tensor.stream);
      copies.add(device_->memory(*value->hbm.at).data(), tensor.data.data(), tensor.data.size());
      copies.finish();
    }
    over();
    if (!instead) {
      check(tensor);
      goes_below = stays_below();
    }
  } catch (...) {
    over();
    if (!instead) hbm_.free.give_back(*value->hbm.at);
    throw;
  }
  if (goes_below) {
    hbm_.free.give_back(*value->hbm.at);
    return false;
  }
  if (!instead) install(value);
  ahead_->notify_all();
  return true;
}

void TieredTensors::put_in_host(const TensorToPut& tensor, Lock& lock) {
  const Value value = make_value(tensor);
  TensorRecord& record = value->record;
  const auto before = names_.find(tensor.name);
  // What nobody looks at is overwritten where it lies.
  if (before != names_.end() && before->second->host.at && !before->second->busy()) {
    TensorValue& old = *before->second;
    if (old.unwritten()) unwritten_bytes_ -= record.padded_bytes();
    unplace(old, host_);
    value->host.at = std::exchange(old.host.at, std::nullopt);
  } else {
    value->host.at = take_host(tensor.name, record.padded_bytes(), lock);
    try {
      check(tensor);  // it was another thread's turn meanwhile
    } catch (...) {
      host_.free.give_back(*value->host.at);
      throw;
    }
  }
  value->filling = true;
  install(value);
  try {
    if (write_behind(record.padded_bytes())) open_write(value);
  } catch (const Error&) {  // it is in host memory all the same
  }
  const std::shared_ptr<TensorTransfer> write = value->transfer;
  const std::span<std::byte> to = memory(*value->host.at);
  const std::uint64_t step = align_up(kWrittenBeside, record.block_bytes);
  lock.unlock();
  for (std::uint64_t at = 0; at < to.size(); at += step) {
    const auto piece = to.subspan(at, std::min(step, to.size() - at));
    take_bytes(tensor, at, piece, record);
    if (write) write->add(record.parts, at, piece);
  }
  if (write) write->close();
  lock.lock();
  value->filling = false;
  changed_->notify_all();
  if (value->named && !write) unwritten_bytes_ += record.padded_bytes();
}

void TieredTensors::put_down_in_host(const TensorToPut& tensor, Lock& lock) {
  const Value value = make_value(tensor);
  const Extent host = take_host(tensor.name, value->record.padded_bytes(), lock);
  const Arriving arriving(*this, host_);
  try {
    {
      const Unlocked free(lock);
      take_bytes(tensor, 0, memory(host), value->record);
    }
    check(tensor);
  } catch (...) {
    host_.free.give_back(host);
    throw;
  }
  value->host.at = host;
  install(value);
  unwritten_bytes_ += value->record.padded_bytes();
}

void TieredTensors::put_on_nvme(const TensorToPut& tensor, Lock& lock) {
  if (!files_)
    throw Error(Code::kDoesNotFit,
                {tensor.name,
                 fmt::format("takes {} bytes, and host_bytes have room for {}", tensor.data.size(), host_.capacity), 0,
                 "raise host_bytes, or name paths"});
  files_->refuse_uncertain();
  const Value value = make_value(tensor);
  take_parts(*value);
  try {
    {
      const Unlocked free(lock);
      write_through_staging(*value, [&](auto at, auto to) { take_bytes(tensor, at, to, value->record); });
    }
    check(tensor);
  } catch (...) {
    // Neither a name nor a commit has these parts yet: they are free at once.
    give_up_parts(*value);
    throw;
  }
  value->on_nvme = true;
  install(value);
}

void TieredTensors::write_through_staging(const TensorValue& value, const Bring& bring) {
  const TensorRecord& record = value.record;
  const std::lock_guard staging(staging_mutex_);
  const std::uint64_t half = staging_.bytes / 2 / record.block_bytes * record.block_bytes;
  const std::uint64_t step = half > 0 ? half : staging_.bytes / record.block_bytes * record.block_bytes;
  std::array<std::optional<TensorTransfer>, 2> writes;
  const auto wait = [&](std::optional<TensorTransfer>& write) {
    if (!write) return;
    write->wait();
    const auto failure = write->failure();
    write.reset();
    if (failure) throw failure_of(value, IoOp::kWrite, *failure);
  };
  for (std::uint64_t at = 0, i = 0; at < record.padded_bytes(); at += step, ++i) {
    const std::uint64_t slot = half > 0 ? i % 2 : 0;
    wait(writes[slot]);
    const auto to = memory({staging_.offset + slot * step, std::min(step, record.padded_bytes() - at)});
    bring(at, to);
    writes[slot].emplace(*thread_, IoOp::kWrite);
    writes[slot]->add(record.parts, at, to);
    writes[slot]->close();
  }
  for (auto& write : writes) wait(write);
}

}  // namespace spillway
