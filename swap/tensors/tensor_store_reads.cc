// What comes out of a store of named tensors: from where, and whether these are the bytes that were put. Bringing bytes
// into host memory that are not there is tensor_store_moves.cc's part.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "swap/tensors/tensor_store_impl.h"

namespace spillway {

void TieredTensors::check_blocks(const TensorValue& value, std::uint64_t first_block,
                                 std::span<const std::byte> bytes) const {
  const TensorRecord& record = value.record;
  for (std::uint64_t block = first_block; !bytes.empty(); ++block) {
    const auto piece = bytes.first(std::min<std::uint64_t>(record.block_bytes, bytes.size()));
    if (granule_checksum(piece) != record.checksums[block]) {
      throw Error(Code::kCorrupt, {value.name,
                                   fmt::format("{} bytes from {} on are not those that were put", piece.size(),
                                               block * record.block_bytes),
                                   0, "check the drive; remove it, or put it anew"});
    }
    bytes = bytes.subspan(piece.size());
  }
}

bool TieredTensors::fetch(const Value& value) {
  const bool above = value->hbm.at && !device_->failed();
  if (value->host.at || above || value->busy()) return value->host.at || above;
  if (!value->on_nvme || value->record.padded_bytes() > host_.capacity) return false;
  const auto host = take_at_once(host_, value->record.padded_bytes());
  if (!host) return false;
  start_read(value, *host);
  touch_ahead(value, host_);
  return true;
}

// The name may stand for another value by the time that this one has come.
TieredTensors::Value TieredTensors::bring_in(const std::string& name, Lock& lock) {
  while (true) {
    Value value = wait_in_host(name, lock);
    if (!value->checked) check_in_host(value, {}, lock);
    if (value->named) return value;
  }
}

TieredTensors::Value TieredTensors::wait_in_host(const std::string& name, Lock& lock) {
  bool missed = false;
  while (true) {
    const Value value = find(name);
    if (value->filling || value->relocating) {
      changed_->wait(lock);
    } else if (value->in_host()) {
      ++(missed ? stats_.misses : stats_.hits);
      touch(value);
      return value;
    } else if (value->transfer) {
      if (auto error = await(value, lock)) throw *error;
    } else if (value->hbm.at && !(value->on_nvme && device_->failed())) {
      copy_down(value, lock);
    } else {
      missed = true;
      const Extent host = take_host(name, value->record.padded_bytes(), lock);
      if (!value->named || value->host.at || value->relocating) {
        host_.free.give_back(host);
      } else {
        start_read(value, host);
      }
    }
  }
}

// Block by block, so that a block is copied while it is in the processor's cache. `out`: of the tensor's size, or
// empty.
void TieredTensors::check_in_host(const Value& value, std::span<std::byte> out, Lock& lock) {
  std::optional<Error> wrong;
  {
    const Use use(*this, value, lock);
    const std::span<const std::byte> from = memory(*value->host.at);
    const std::uint64_t step = value->record.block_bytes;
    try {
      for (std::uint64_t at = 0; at < from.size(); at += step) {
        const auto block = from.subspan(at, std::min(step, from.size() - at));
        check_blocks(*value, at / step, block);
        if (at < out.size()) std::memcpy(out.data() + at, block.data(), std::min(block.size(), out.size() - at));
      }
    } catch (const Error& error) {
      wrong = error;
    }
  }
  value->checked = !wrong;
  if (!wrong) return;
  if (value->named && value->host.at && !value->busy()) leave(*value, host_);
  throw *wrong;
}

void TieredTensors::get(std::span<const TensorToGet> tensors) {
  Entry lock = enter();
  for (const TensorToGet& wanted : tensors) {
    check_place(wanted.memory);
    check_size(*find(wanted.name), wanted);
  }
  // The next ones come while one is checked and copied.
  std::size_t ahead = tensors.size() > 1 ? 0 : 1;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (ahead = std::max(ahead, i); ahead < tensors.size(); ++ahead) {
      if (const auto found = names_.find(tensors[ahead].name); found != names_.end() && !fetch(found->second)) break;
    }
    get_one(tensors[i], lock);
  }
}

void TieredTensors::check_size(const TensorValue& value, const TensorToGet& wanted) const {
  if (wanted.out.size() == value.record.bytes) return;
  refuse_tensor(value.name,
                fmt::format("has {} bytes, and there is room for {}", value.record.bytes, wanted.out.size()),
                "bring memory of its size");
}

void TieredTensors::get_one(const TensorToGet& wanted, Lock& lock) {
  std::optional<HbmMemory::Copies> to_device;
  if (wanted.memory == Placement::kHbm) {
    if (get_by_hbm(wanted, lock)) return;
    to_device.emplace(*device_, CopyKind::kHostToDevice, wanted.name, wanted.stream);
  }
  Value value = find(wanted.name);
  while (value->filling) {
    changed_->wait(lock);
    value = find(wanted.name);
  }
  if (!value->in_host() && value->in_hbm() && !(value->on_nvme && device_->failed()) && !to_device) {
    check_size(*value, wanted);
    ++stats_.hbm_hits;
    touch(value);
    return copy_pieces_from_hbm(value, pieces_of(*value, staging_.bytes, wanted.out.data()), lock);
  }
  const bool passes = value->record.padded_bytes() > host_.capacity;
  if (!passes) {
    try {
      value = wait_in_host(wanted.name, lock);
    } catch (const Error&) {
      value = find(wanted.name);
      if (!value->on_nvme || value->host.at) throw;
    }
  }
  check_size(*value, wanted);         // it may be another one meanwhile
  if (passes || !value->in_host()) {  // nothing makes room for it, and nothing needs to
    ++stats_.misses;
    return copy_pieces(value, pieces_of(*value, value->record.block_bytes, wanted.out.data()), lock,
                       to_device ? &*to_device : nullptr);
  }
  if (!value->checked) {
    check_in_host(value, to_device ? std::span<std::byte>() : wanted.out, lock);
    if (!to_device) return;
  }
  const std::byte* const from = memory(*value->host.at).data();
  const Use use(*this, value, lock);
  if (to_device) {
    to_device->add(wanted.out.data(), from, wanted.out.size());
    to_device->finish();
  } else if (!wanted.out.empty()) {
    std::memcpy(wanted.out.data(), from, wanted.out.size());
  }
}

std::vector<TieredTensors::Piece> TieredTensors::pieces_of(const TensorValue& value, std::uint64_t step,
                                                           std::byte* to) const {
  std::vector<Piece> pieces;
  for (std::uint64_t at = 0; at < value.record.bytes; at += step) {
    pieces.push_back({at, std::min(step, value.record.bytes - at), to + at});
  }
  return pieces;
}

void TieredTensors::read_rows(const std::string& name, std::uint64_t row_bytes, std::span<const std::uint64_t> rows,
                              std::span<std::byte> out) {
  Entry lock = enter();
  Value value = find(name);
  const std::uint64_t bytes = value->record.bytes, block_bytes = value->record.block_bytes;
  if (row_bytes == 0 || bytes % row_bytes != 0)
    refuse_tensor(name, fmt::format("of {} bytes has no rows of {} bytes", bytes, row_bytes),
                  "give the size of its rows");
  if (out.size() / row_bytes != rows.size() || out.size() % row_bytes != 0)
    refuse_tensor(name, fmt::format("{} rows take other room than {} bytes", rows.size(), out.size()),
                  "bring memory for all of them");
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= bytes / row_bytes)
      refuse_tensor(name, fmt::format("has {} rows, and no row {}", bytes / row_bytes, rows[i]), "count from 0");
    for (std::uint64_t at = rows[i] * row_bytes, end = at + row_bytes; at < end;) {
      const std::uint64_t size = std::min(end, (at / block_bytes + 1) * block_bytes) - at;
      pieces.push_back({at, size, out.data() + i * row_bytes + (at - rows[i] * row_bytes)});
      at += size;
    }
  }
  // A put under way has the lock only now and then: its checksums are complete when it has ended.
  while (value->filling) {
    changed_->wait(lock);
    value = find(name);
  }
  if (value->record.bytes != bytes || value->record.block_bytes != block_bytes)
    refuse_tensor(name, "was replaced by another size meanwhile", "call again");
  if (!value->in_host() && value->in_hbm() && !(value->on_nvme && device_->failed())) {
    touch(value);
    return copy_pieces_from_hbm(value, pieces, lock);
  }
  if (!value->in_host()) return copy_pieces(value, pieces, lock);
  touch(value);
  if (!value->checked) check_in_host(value, {}, lock);
  const std::byte* const from = memory(*value->host.at).data();
  const Use use(*this, value, lock);
  for (const Piece& piece : pieces) std::memcpy(piece.to, from + piece.offset, piece.bytes);
}

void TieredTensors::copy_pieces(const Value& value, std::span<const Piece> pieces, Lock& lock,
                                HbmMemory::Copies* to_device) {
  const Use use(*this, value, lock);
  // One read at a time passes through staging: it is small, so that tensors have the rest of host memory.
  const std::lock_guard staging(staging_mutex_);
  while (!pieces.empty()) pieces = pieces.subspan(copy_some(*value, pieces, to_device));
}

// As many as staging has blocks for, at once; how many that were.
std::size_t TieredTensors::copy_some(const TensorValue& value, std::span<const Piece> pieces,
                                     HbmMemory::Copies* to_device) {
  const TensorRecord& record = value.record;
  const auto block_of = [&](const Piece& piece) { return piece.offset / record.block_bytes; };
  const auto bytes_of = [&](std::uint64_t block) {
    return std::min(record.block_bytes, record.padded_bytes() - block * record.block_bytes);
  };
  std::map<std::uint64_t, std::span<std::byte>> blocks;
  std::span<std::byte> room = memory(staging_);
  TensorTransfer transfer(*thread_, IoOp::kRead);
  std::size_t taken = 0;
  for (; taken < pieces.size(); ++taken) {
    const std::uint64_t block = block_of(pieces[taken]);
    if (blocks.contains(block)) continue;
    if (room.size() < bytes_of(block)) break;
    blocks[block] = room.first(bytes_of(block));
    transfer.add(record.parts, block * record.block_bytes, blocks[block]);
    room = room.subspan(bytes_of(block));
  }
  transfer.close();
  transfer.wait();
  if (const auto failure = transfer.failure()) throw failure_of(value, IoOp::kRead, *failure);
  for (const auto& [block, bytes] : blocks) check_blocks(value, block, bytes);
  for (const Piece& piece : pieces.first(taken)) {
    const std::byte* const from = blocks[block_of(piece)].data() + piece.offset % record.block_bytes;
    to_device ? to_device->add(piece.to, from, piece.bytes) : void(std::memcpy(piece.to, from, piece.bytes));
  }
  if (to_device) to_device->finish();
  return taken;
}

}  // namespace spillway
