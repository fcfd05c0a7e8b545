// Host memory of a store of named tensors: which tensors leave it, and what is written and read for that.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "spillway/error.h"
#include "swap/tensors/tensor_store_impl.h"

namespace spillway {

void TieredTensors::unplace(TensorValue& value, Tier& tier) {
  auto& turn = tier.of(value).turn;
  if (turn) tier.turns.erase(*turn);
  turn.reset();
}

void TieredTensors::place(const Value& value) {
  for (Tier* tier : {&host_, &hbm_}) {
    unplace(*value, *tier);
    TensorValue::Held& held = tier->of(*value);
    if (!held.at || !value->named) continue;
    held.turn = value->turn(held);
    tier->turns[*held.turn] = value;
  }
}

void TieredTensors::touch(const Value& value) {
  value->last_use = ++clock_;
  value->host.awaited = value->hbm.awaited = false;
  value->next_use.reset();
  place(value);
}

void TieredTensors::touch_ahead(const Value& value, Tier& tier) {
  value->last_use = ++clock_;
  tier.of(*value).awaited = true;
  place(value);
}

void TieredTensors::leave(TensorValue& value, Tier& tier) {
  if (&tier == &host_ && value.named && value.unwritten()) unwritten_bytes_ -= value.record.padded_bytes();
  unplace(value, tier);
  tier.free.give_back(*tier.of(value).at);
  tier.of(value).at.reset();
}

void TieredTensors::evict(const Value& value, Tier& tier) {
  leave(*value, tier);
  place(value);
  ++(&tier == &host_ ? stats_.evictions : stats_.hbm_evictions);
}

// What a GPU that has failed has is lost.
bool TieredTensors::in_live_hbm(const TensorValue& value) const { return value.in_hbm() && !device_->failed(); }

// Where it does not get lost, should it leave this one. What only HBM has besides is written before it leaves host
// memory: both may leave at once then.
bool TieredTensors::is_elsewhere(const TensorValue& value, const Tier& tier) const {
  if (value.on_nvme) return true;
  return &tier == &hbm_ ? value.in_host() : !files_ && in_live_hbm(value);
}

Error TieredTensors::failure_of(const TensorValue& value, IoOp op, const TensorTransfer::Failure& failure) const {
  const File& file = thread_->file(failure.completion.error_file);
  const std::string of_queue = thread_->queue_failure();
  const Error moved = transfer_error(op, file, failure.completion, std::string());
  const char* const hint = op == IoOp::kRead ? "check the drive; remove it, or put it anew"
                           : value.host.at   ? "check the drive; it is still in host memory"
                           : value.hbm.at    ? "check the drive; it is still in HBM"
                                             : "check the drive, and put it again";
  return Error(Code::kIo, {value.name, moved.what() + (of_queue.empty() ? "" : ": " + of_queue), 0, hint});
}

std::optional<Error> TieredTensors::finish(TensorValue& value) {
  const std::shared_ptr<TensorTransfer> transfer = std::exchange(value.transfer, nullptr);
  std::erase_if(moving_, [&](const Value& v) { return v.get() == &value; });
  changed_->notify_all();
  const auto failure = transfer->failure();
  const bool write = transfer->op() == IoOp::kWrite;
  if (!failure) {
    (write ? value.on_nvme : value.checked) = write;
    return std::nullopt;
  }
  Error error = failure_of(value, transfer->op(), *failure);
  if (write) {
    give_up_parts(value);
    if (value.named) unwritten_bytes_ += value.record.padded_bytes();
  } else {
    leave(value, host_);
  }
  return error;
}

std::optional<Error> TieredTensors::await(const Value& value, Lock& lock) {
  const std::shared_ptr<TensorTransfer> transfer = value->transfer;
  if (!transfer) return std::nullopt;
  lock.unlock();
  transfer->wait();
  lock.lock();
  changed_->wait(lock, [&] { return !value->filling; });  // it was written while it was copied
  if (value->transfer != transfer) return std::nullopt;   // another thread has seen to it
  return finish(*value);
}

// What is over is no news to anybody who waits for it: a read is made again by who needs it, and so is a write.
void TieredTensors::sweep() {
  for (const Value& value : std::vector<Value>(moving_)) {
    if (value->filling || !value->transfer || !value->transfer->done()) continue;
    if (const auto error = finish(*value)) to_say_.emplace_back(error->what());
  }
  std::erase_if(leaving_, [&](const Value& value) { return release(*value); });
}

void TieredTensors::retire(const Value& value) {
  if (value->unwritten()) unwritten_bytes_ -= value->record.padded_bytes();
  value->named = false;
  unplace(*value, host_);
  unplace(*value, hbm_);
  changed_since_commit_ = true;
  if (!release(*value)) leaving_.push_back(value);
}

bool TieredTensors::release(TensorValue& value) {
  if (value.busy()) return false;
  for (Tier* tier : {&host_, &hbm_}) {
    if (tier->of(value).at) leave(value, *tier);
  }
  if (!value.on_nvme) return true;
  for (const Extent& part : files_->give_up(value.name, value.record)) {
    // The last commit still names a committed value's parts: they are free after the next one.
    value.committed ? after_commit_.push_back(part) : files_->free().give_back(part);
  }
  return true;
}

void TieredTensors::give_up_parts(TensorValue& value) {
  for (const Extent& part : files_->give_up(value.name, value.record)) files_->free().give_back(part);
}

void TieredTensors::take_parts(TensorValue& value) {
  sweep();
  if (files_->take_parts(value.name, value.record)) return;
  std::uint64_t kept = 0;
  for (const Extent& part : after_commit_) kept += part.bytes;
  throw Error(Code::kDoesNotFit,
              {value.name,
               fmt::format("takes {} bytes and {} in the next commit's table, and {} of {} are free in nvme_bytes",
                           value.record.padded_bytes(), table_bytes(value.name, value.record),
                           files_->free_for_tensors(), files_->capacity()),
               0,
               kept > 0 ? fmt::format("commit(), which frees {} bytes that the last commit still names", kept)
                        : "remove tensors, or make the store larger"});
}

// What is added to value->transfer from now on is written; without one there is nothing to write.
void TieredTensors::open_write(const Value& value) {
  files_->refuse_uncertain();
  take_parts(*value);
  if (value->record.parts.empty()) {
    value->on_nvme = true;
    return;
  }
  value->transfer = std::make_shared<TensorTransfer>(*thread_, IoOp::kWrite);
  moving_.push_back(value);
}

void TieredTensors::start_write(const Value& value) {
  open_write(value);
  if (value->named) unwritten_bytes_ -= value->record.padded_bytes();
  if (!value->transfer) return;
  value->transfer->add(value->record.parts, 0, memory(*value->host.at));
  value->transfer->close();
}

void TieredTensors::start_read(const Value& value, const Extent& host) {
  value->host.at = host;
  value->checked = false;
  place(value);
  value->transfer = std::make_shared<TensorTransfer>(*thread_, IoOp::kRead);
  moving_.push_back(value);
  value->transfer->add(value->record.parts, 0, memory(host));
  value->transfer->close();
}

// Half of host memory may be ahead of NVMe: the rest is written while there is time, so that it can leave at once.
// `coming`: bytes that are being put, beside whose copy the drive writes. True: they, too, are to be written.
bool TieredTensors::write_behind(std::uint64_t coming) {
  if (!files_ || files_->uncertain()) return false;
  const std::uint64_t most = host_.capacity / 2;
  for (auto turn = host_.turns.begin(); turn != host_.turns.end() && unwritten_bytes_ + coming > most; ++turn) {
    const Value value = turn->second;
    if (value->busy() || !value->unwritten()) continue;
    if (value->record.padded_bytes() > files_->free_for_tensors()) return false;
    try {
      start_write(value);
    } catch (const Error&) {  // whoever needs the room will say so
      return false;
    }
  }
  return unwritten_bytes_ + coming > most && coming <= files_->free_for_tensors();
}

// Only those leave that can at once, and that nobody waits for.
std::optional<Extent> TieredTensors::take_at_once(Tier& tier, std::uint64_t bytes) {
  if (bytes == 0) return Extent{};
  sweep();
  auto taken = tier.free.take(bytes);
  for (auto turn = tier.turns.begin(); !taken && turn != tier.turns.end();) {
    const Value value = (turn++)->second;
    const TensorValue::Held& held = tier.of(*value);
    if (held.awaited) break;
    if (value->busy() || held.pins > 0 || !is_elsewhere(*value, tier)) continue;
    evict(value, tier);
    taken = tier.free.take(bytes);
  }
  return taken;
}

// One step towards a range of so many bytes; false: there is none to make.
bool TieredTensors::make_room(std::uint64_t bytes, Lock& lock) {
  std::uint64_t under_way = 0;
  Value first;
  bool reads = false;  // the first
  std::optional<Error> failed;
  for (auto turn = host_.turns.begin(); turn != host_.turns.end(); ++turn) {
    const Value value = turn->second;
    if (value->host.pins > 0 || value->stays()) continue;
    if (!value->transfer && is_elsewhere(*value, host_)) {
      evict(value, host_);
      return true;
    }
    if (!files_) continue;
    try {
      if (!value->transfer) start_write(value);
    } catch (const Error& error) {  // others may leave all the same
      if (!failed) failed = error;
    }
    if (!value->transfer) continue;
    if (!first) {
      first = value;
      reads = value->transfer->op() == IoOp::kRead;
    }
    under_way += value->record.padded_bytes();
    if (under_way >= bytes) break;
  }
  // Several writes are started, so that the drive is busy, and the first of them is waited for.
  if (first) {
    if (const auto error = await(first, lock)) {
      if (!reads) throw *error;  // the memory of a read that failed is free
      to_say_.emplace_back(error->what());
    }
    return true;
  }
  if (failed) throw *failed;
  // What is pinned does not leave, and what has lost its name goes once nobody uses it.
  if (!moving_.empty()) {
    await(Value(moving_.front()), lock);
    return true;
  }
  const bool in_use = host_.arriving > 0 || !leaving_.empty() ||
                      std::ranges::any_of(host_.turns, [](const auto& turn) { return turn.second->busy(); });
  if (in_use) changed_->wait(lock);
  return in_use;
}

Extent TieredTensors::take_host(const std::string& name, std::uint64_t bytes, Lock& lock) {
  if (bytes == 0) return {};
  while (true) {
    sweep();
    if (const auto taken = host_.free.take(bytes)) return *taken;
    if (!make_room(bytes, lock))
      refuse_full(name, bytes, host_,
                  files_ ? "unpin tensors, or raise host_bytes" : "remove tensors, raise host_bytes, or name paths");
  }
}

void TieredTensors::refuse_full(const std::string& name, std::uint64_t bytes, const Tier& tier,
                                const char* hint) const {
  std::uint64_t pinned = 0;
  for (const auto& [turn, value] : tier.turns) pinned += tier.of(*value).pins > 0 ? value->record.padded_bytes() : 0;
  throw Error(Code::kDoesNotFit, {name,
                                  fmt::format("takes {} bytes in one piece, and {} of {} are free in {}, {} are pinned",
                                              bytes, tier.free.free_bytes(), tier.capacity, tier.key, pinned),
                                  0, hint});
}

}  // namespace spillway
