// HBM of a store of named tensors: who leaves it, and where to; who comes up, and where from.
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "swap/tensors/tensor_store_impl.h"

namespace spillway {

void TieredTensors::relocate(const Value& value, Lock& lock, const std::function<void()>& copy) {
  value->relocating = true;
  const auto over = [&] {
    value->relocating = false;
    changed_->notify_all();
  };
  try {
    const Unlocked free(lock);
    copy();
  } catch (...) {
    over();
    throw;
  }
  over();
}

void TieredTensors::copy_down(const Value& value, Lock& lock) {
  const Extent host = take_host(value->name, value->record.padded_bytes(), lock);
  // take_host() may have waited: the value may have lost its name, or have moved, meanwhile.
  if (value->named && value->in_hbm() && !value->host.at && !value->relocating) return copy_down_to(host, value, lock);
  host_.free.give_back(host);
}

void TieredTensors::copy_down_to(const Extent& host, const Value& value, Lock& lock) {
  const Arriving arriving(*this, host_);
  TensorRecord& record = value->record;
  // What NVMe has as well has its checksums; of all else they are taken as the bytes pass.
  const bool sums_are_known = value->on_nvme;
  try {
    relocate(value, lock, [&] {
      const std::span<std::byte> to = memory(host);
      HbmMemory::Copies down(*device_, CopyKind::kDeviceToHost, value->name);
      down.add(to.data(), device_->memory(*value->hbm.at).data(), record.bytes);
      down.finish();
      std::ranges::fill(to.subspan(record.bytes), std::byte{0});
      if (!sums_are_known) take_checksums(to, record.block_bytes, record.checksums.data());
    });
  } catch (...) {
    host_.free.give_back(host);
    throw;
  }
  value->host.at = host;
  value->checked = true;
  place(value);
  if (value->named && !value->on_nvme) unwritten_bytes_ += record.padded_bytes();
}

// Past host memory.
void TieredTensors::pass_down(const Value& value, Lock& lock) {
  files_->refuse_uncertain();
  TensorRecord& record = value->record;
  take_parts(*value);
  const std::span<const std::byte> from = device_->memory(*value->hbm.at);
  try {
    relocate(value, lock, [&] {
      write_through_staging(*value, [&](std::uint64_t at, std::span<std::byte> to) {
        const std::size_t bytes = std::min<std::uint64_t>(to.size(), record.bytes - at);
        HbmMemory::Copies down(*device_, CopyKind::kDeviceToHost, value->name);
        down.add(to.data(), from.data() + at, bytes);
        down.finish();
        std::ranges::fill(to.subspan(bytes), std::byte{0});
        take_checksums(to, record.block_bytes, &record.checksums[at / record.block_bytes]);
      });
    });
  } catch (...) {
    give_up_parts(*value);
    throw;
  }
  value->on_nvme = true;
}

void TieredTensors::save_below(const Value& value, Lock& lock) {
  try {
    if (value->record.padded_bytes() <= host_.capacity) return copy_down(value, lock);
    if (!files_)
      throw Error(Code::kDoesNotFit, {value->name, "is larger than host memory, and cannot leave HBM", 0,
                                      "raise host_bytes, or name paths"});
  } catch (const Error& full) {
    // Host memory is full: it goes to NVMe, past host memory.
    if (!files_ || full.code() != Code::kDoesNotFit) throw;
  }
  if (value->named && value->in_hbm() && !value->on_nvme && !value->host.at && !value->relocating)
    pass_down(value, lock);
}

// One step towards a range in HBM; false: there is none to make.
bool TieredTensors::make_hbm_room(Lock& lock) {
  const std::uint64_t free = hbm_.free.free_bytes();
  std::vector<Value> refused;
  std::optional<Error> failed;
  while (true) {
    const auto next = std::ranges::find_if(hbm_.turns, [&](const auto& turn) {
      const Value& value = turn.second;
      return value->hbm.pins == 0 && !value->stays() && std::ranges::find(refused, value) == refused.end();
    });
    if (next == hbm_.turns.end()) break;
    const Value value = next->second;
    if (is_elsewhere(*value, hbm_)) {
      evict(value, hbm_);
      return true;
    }
    try {
      save_below(value, lock);
      return true;
    } catch (const Error& error) {  // others may leave all the same
      refused.push_back(value);
      if (!failed || failed->code() == Code::kDoesNotFit) failed = error;
    }
  }
  // The mutex may have been free: what others let go of meanwhile nobody tells of again.
  sweep();
  if (hbm_.free.free_bytes() > free) return true;
  // What has lost its name goes once nobody uses it, and nothing moves it.
  const auto goes = std::ranges::find_if(leaving_, [](const Value& value) { return value->hbm.at.has_value(); });
  if (goes != leaving_.end() && (*goes)->transfer) {
    await(Value(*goes), lock);
    return true;
  }
  // What others have under way will make room.
  if (hbm_.arriving > 0 || goes != leaving_.end() || std::ranges::any_of(hbm_.turns, [](const auto& turn) {
        return turn.second->hbm.pins == 0 && turn.second->stays();
      })) {
    changed_->wait(lock);
    return true;
  }
  if (failed && failed->code() != Code::kDoesNotFit) throw *failed;
  return false;
}

Extent TieredTensors::take_hbm(const std::string& name, std::uint64_t bytes, Lock& lock) {
  if (bytes == 0) return {};
  while (true) {
    sweep();
    if (const auto taken = hbm_.free.take(bytes)) return *taken;
    if (!make_hbm_room(lock)) refuse_full(name, bytes, hbm_, "unpin tensors there, or raise hbm_bytes");
  }
}

// True: the value is whole in host memory, and checked. False: it is read from NVMe in pieces, or has lost its name.
bool TieredTensors::wait_below(const Value& value, Lock& lock) {
  while (value->named) {
    if (value->filling || value->relocating) {
      changed_->wait(lock);
    } else if (value->in_host()) {
      if (value->checked) return true;
      check_in_host(value, {}, lock);
    } else if (value->transfer) {
      if (auto error = await(value, lock)) throw *error;
    } else if (value->record.padded_bytes() > host_.capacity) {
      return false;
    } else {
      Extent host;
      try {
        host = take_host(value->name, value->record.padded_bytes(), lock);
      } catch (const Error& full) {
        if (full.code() != Code::kDoesNotFit || !value->on_nvme) throw;
        if (!value->host.at) return false;
        continue;
      }
      if (value->named && !value->host.at && !value->relocating) {
        start_read(value, host);
      } else {
        host_.free.give_back(host);
      }
    }
  }
  return false;
}

void TieredTensors::raise(const Value& value, const Extent& place, Lock& lock) {
  value->rising = true;
  bool came = false;
  const auto over = [&] {
    value->rising = false;
    changed_->notify_all();
    // It failed, or the name has another value by now.
    if (!came || !value->named) return hbm_.free.give_back(place);
    value->hbm.at = place;
    value->host.awaited = false;
    this->place(value);
  };
  try {
    std::byte* const to = device_->memory(place).data();
    const bool whole = wait_below(value, lock);
    if (value->named) {
      HbmMemory::Copies up(*device_, CopyKind::kHostToDevice, value->name);
      if (whole) {
        relocate(value, lock, [&] {
          up.add(to, memory(*value->host.at).data(), value->record.bytes);
          up.finish();
        });
      } else {
        copy_pieces(value, pieces_of(*value, value->record.block_bytes, to), lock, &up);
      }
      came = true;
    }
  } catch (...) {
    over();
    throw;
  }
  over();
}

TieredTensors::Value TieredTensors::bring_up(const std::string& name, Lock& lock) {
  std::uint64_t* from = &stats_.hbm_hits;
  while (true) {
    const Value value = find(name);
    if (value->filling || value->rising) {
      changed_->wait(lock);
      continue;
    }
    if (value->hbm.at) {
      device_->throw_if_failed(name);
      ++*from;
      touch(value);
      return value;
    }
    from = value->in_host() ? &stats_.hits : &stats_.misses;
    const Extent place = take_hbm(name, value->record.padded_bytes(), lock);
    if (!value->named || value->hbm.at || value->rising) {
      hbm_.free.give_back(place);
      continue;
    }
    const Arriving arriving(*this, hbm_);
    raise(value, place, lock);
  }
}

bool TieredTensors::fetch_up(const Value& value) {
  if (device_->failed()) return fetch(value);
  if (value->hbm.at || value->rising) return true;
  if (value->record.padded_bytes() > hbm_.capacity) return false;
  const auto place = take_at_once(hbm_, value->record.padded_bytes());
  if (!place) return false;
  value->rising = true;
  ++hbm_.arriving;
  risings_.push_back({value, *place});
  fetch(value);  // so that the drives have it to read
  ahead_->notify_all();
  return true;
}

bool TieredTensors::get_by_hbm(const TensorToGet& wanted, Lock& lock) {
  if (find(wanted.name)->record.padded_bytes() > hbm_.capacity) return false;
  Value value;
  try {
    value = bring_up(wanted.name, lock);
  } catch (const Error& full) {
    if (full.code() != Code::kDoesNotFit) throw;
    return false;
  }
  check_size(*value, wanted);
  const std::byte* const from = device_->memory(*value->hbm.at).data();
  const Use use(*this, value, lock);
  HbmMemory::Copies copies(*device_, CopyKind::kDeviceToDevice, wanted.name, wanted.stream);
  copies.add(wanted.out.data(), from, wanted.out.size());
  copies.finish();
  return true;
}

void TieredTensors::copy_pieces_from_hbm(const Value& value, std::span<const Piece> pieces, Lock& lock) {
  constexpr std::uint64_t kApart = 64;  // bytes, of pieces side by side
  const std::byte* const from = device_->memory(*value->hbm.at).data();
  const Use use(*this, value, lock);
  const std::lock_guard staging(staging_mutex_);
  while (!pieces.empty()) {
    // As many pieces as the staging memory holds, so that many small rows cost one wait.
    const std::span<std::byte> room = memory(staging_);
    HbmMemory::Copies down(*device_, CopyKind::kDeviceToHost, value->name);
    std::vector<std::uint64_t> places;
    for (std::uint64_t at = 0; places.size() < pieces.size();
         at = align_up(at + pieces[places.size() - 1].bytes, kApart)) {
      const Piece& piece = pieces[places.size()];
      if (at + piece.bytes > room.size()) break;
      down.add(room.data() + at, from + piece.offset, piece.bytes);
      places.push_back(at);
    }
    down.finish();
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::memcpy(pieces[i].to, room.data() + places[i], pieces[i].bytes);
    }
    pieces = pieces.subspan(places.size());
  }
}

// Half of HBM may be ahead of what is below it: the rest is copied to host memory while there is time, so that it can
// leave at once.
bool TieredTensors::copy_behind(Lock& lock) {
  std::uint64_t alone = 0;
  Value first;
  for (const auto& [turn, value] : hbm_.turns) {
    if (value->hbm.pins > 0 || value->stays() || is_elsewhere(*value, hbm_)) continue;
    alone += value->record.padded_bytes();
    if (!first) first = value;
  }
  if (alone <= hbm_.capacity / 2 || first->record.padded_bytes() > host_.capacity || device_->failed()) return false;
  // Without files those that leave host memory are copies of the same kind.
  const std::uint64_t bytes = first->record.padded_bytes();
  const auto host = files_ ? take_at_once(host_, bytes) : host_.free.take(bytes);
  if (!host) return false;
  copy_down_to(*host, first, lock);
  write_behind(0);
  return true;
}

void TieredTensors::move_ahead() {
  ::pthread_setname_np(::pthread_self(), "spillway hbm");
  Lock lock(mutex_);
  // What fails is no news to anybody who waits for it: who needs it does it again, and is told.
  const auto done = [&](const auto& what) {
    try {
      return what();
    } catch (const Error& error) {
      to_say_.emplace_back(error.what());
      return false;
    }
  };
  while (!stopping_) {
    if (!to_say_.empty()) {
      say(lock);
      lock.lock();
    } else if (!risings_.empty()) {
      const Rising next = risings_.front();
      risings_.pop_front();
      const bool came = done([&] {
        raise(next.value, next.place, lock);
        return true;
      });
      if (came && next.value->hbm.at) touch_ahead(next.value, hbm_);
      --hbm_.arriving;
      changed_->notify_all();
    } else if (!done([&] { return copy_behind(lock); })) {
      ahead_->wait(lock);
    }
  }
}

}  // namespace spillway
