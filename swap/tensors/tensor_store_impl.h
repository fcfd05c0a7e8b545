// The store of named tensors: the implementation of spillway/tensor_store.h, in five files.
//
//   tensor_store.cc         calls: prefetch, pin, commit, remove, what there is
//   tensor_store_puts.cc    put: into host memory, into HBM, past both
//   tensor_store_reads.cc   get, rows: where the bytes come from, and whether they are the right ones
//   tensor_store_moves.cc   host memory: who leaves it, what is written and read for that
//   tensor_store_hbm.cc     HBM: who leaves it, what comes up
//
// One mutex guards all of it. Copies, checksums and waiting happen outside: a value that is `filling` or `relocating`,
// has `users` or a `transfer` stays where it is. Whoever waits for room, or for another thread's copy, has none under
// way itself: so all of them come to an end. Read next: tensor_value.h, then tensor_files.h.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/host_memory.h"
#include "spillway/tensor_store.h"
#include "swap/store_thread.h"
#include "swap/tensors/free_ranges.h"
#include "swap/tensors/hbm_memory.h"
#include "swap/tensors/tensor_files.h"
#include "swap/tensors/tensor_value.h"

namespace spillway {

[[noreturn]] void refuse_tensor(std::string object, std::string happened, std::string hint);
[[noreturn]] void refuse_pinned(const std::string& name);

template <typename Names, typename Name>
void refuse_twice(const Names& names, Name name_of) {
  std::set<std::string> seen;
  for (const auto& name : names) {
    if (!seen.insert(name_of(name)).second) refuse_tensor(name_of(name), "is named twice in one call", "name it once");
  }
}

// A checksum for each block of `bytes`, the first of them to `sums`.
void take_checksums(std::span<const std::byte> bytes, std::uint64_t block_bytes, std::uint64_t* sums);

class TieredTensors final : public TensorStore {
 public:
  TieredTensors(const TensorStoreOptions& options, std::unique_ptr<TensorFiles> files);
  ~TieredTensors() override;

  void put(std::span<const TensorToPut> tensors) override;
  void get(std::span<const TensorToGet> tensors) override;
  void read_rows(const std::string& name, std::uint64_t row_bytes, std::span<const std::uint64_t> rows,
                 std::span<std::byte> out) override;
  std::size_t prefetch(std::span<const std::string> names, Placement to) override;
  std::span<const std::byte> pin(const std::string& name, Placement in) override;
  void unpin(const std::string& name, Placement in) override;
  void set_next_use(const std::string& name, std::optional<std::uint64_t> when) override;
  void remove(std::span<const std::string> names) override;
  std::uint64_t commit() override;
  bool contains(const std::string& name) const override;
  TensorInfo info(const std::string& name) const override;
  std::vector<TensorInfo> list() const override;
  TensorStoreStats stats() const override;
  std::optional<DeviceKind> device() const override;

 private:
  using Value = std::shared_ptr<TensorValue>;
  using Lock = std::unique_lock<std::mutex>;
  // A thread's hold on a value, while the mutex is not held.
  class Use;
  class Entry;
  class Arriving;
  class Unlocked;

  // The memory of one tier.
  struct Tier {
    FreeRanges free;
    std::uint64_t capacity;
    const char* key;  // its budget
    TensorValue::Held TensorValue::*held;
    std::map<TensorValue::Turn, Value> turns = {};  // of those in it
    unsigned arriving = 0;                          // that have a place in it, and no turn yet
    TensorValue::Held& of(TensorValue& value) const { return value.*held; }
  };

  void begin_with_files(const TensorStoreOptions& options);
  void refuse_fork() const;
  Entry enter() const;
  void say(Lock& lock) const;  // what there is to say, and frees the mutex
  const Value& find(const std::string& name) const;
  void check_place(Placement place) const;  // of a call
  void install(const Value& value);
  TensorInfo info_of(const TensorValue& value) const;

  void check(const TensorToPut& tensor) const;
  bool put_in_hbm(const TensorToPut& tensor, Lock& lock);  // false: there is no room for it
  void put_in_host(const TensorToPut& tensor, Lock& lock);
  void put_down_in_host(const TensorToPut& tensor, Lock& lock);  // from device memory
  void put_on_nvme(const TensorToPut& tensor, Lock& lock);
  Value make_value(const TensorToPut& tensor) const;
  // Fills `to` with the tensor's bytes from `at` on, and with zeros after its end, and takes the checksums.
  void take_bytes(const TensorToPut& tensor, std::uint64_t at, std::span<std::byte> to, TensorRecord& record) const;
  // Writes all of a tensor to its parts, piece by piece through staging, where bring(at, piece) fills the next one
  // while the one before is written. The mutex is free.
  using Bring = std::function<void(std::uint64_t at, std::span<std::byte> piece)>;
  void write_through_staging(const TensorValue& value, const Bring& bring);

  void check_size(const TensorValue& value, const TensorToGet& wanted) const;
  void get_one(const TensorToGet& wanted, Lock& lock);
  bool get_by_hbm(const TensorToGet& wanted, Lock& lock);  // false: there is no room for it
  bool fetch(const Value& value);                          // false: there is no room for it now
  // All of it is in host memory then, and checked.
  Value bring_in(const std::string& name, Lock& lock);
  Value wait_in_host(const std::string& name, Lock& lock);                       // perhaps not checked
  void check_in_host(const Value& value, std::span<std::byte> out, Lock& lock);  // copies it out, too
  void check_blocks(const TensorValue& value, std::uint64_t first_block, std::span<const std::byte> bytes) const;
  // From NVMe one block at the most, from HBM what staging holds.
  struct Piece {
    std::uint64_t offset, bytes;  // of the tensor
    std::byte* to;
  };
  std::vector<Piece> pieces_of(const TensorValue& value, std::uint64_t step, std::byte* to) const;
  // Host memory, or what `to_device` copies to.
  void copy_pieces(const Value& value, std::span<const Piece> pieces, Lock& lock,
                   HbmMemory::Copies* to_device = nullptr);
  std::size_t copy_some(const TensorValue& value, std::span<const Piece> pieces, HbmMemory::Copies* to_device);
  void copy_pieces_from_hbm(const Value& value, std::span<const Piece> pieces, Lock& lock);

  // Memory for so many bytes; others leave it for that. Waits, with the mutex free.
  Extent take_host(const std::string& name, std::uint64_t bytes, Lock& lock);
  Extent take_hbm(const std::string& name, std::uint64_t bytes, Lock& lock);
  std::optional<Extent> take_at_once(Tier& tier, std::uint64_t bytes);
  bool make_room(std::uint64_t bytes, Lock& lock);
  bool make_hbm_room(Lock& lock);
  [[noreturn]] void refuse_full(const std::string& name, std::uint64_t bytes, const Tier& tier, const char* hint) const;
  bool is_elsewhere(const TensorValue& value, const Tier& tier) const;
  bool in_live_hbm(const TensorValue& value) const;
  void leave(TensorValue& value, Tier& tier);
  void evict(const Value& value, Tier& tier);
  bool write_behind(std::uint64_t coming);
  void open_write(const Value& value);
  void start_write(const Value& value);
  void start_read(const Value& value, const Extent& host);
  void take_parts(TensorValue& value);
  void give_up_parts(TensorValue& value);  // of a write that failed
  // Waits for what moves it; the failure of that.
  std::optional<Error> await(const Value& value, Lock& lock);
  std::optional<Error> finish(TensorValue& value);
  void sweep();
  void retire(const Value& value);
  bool release(TensorValue& value);
  void touch(const Value& value);                    // is used now
  void touch_ahead(const Value& value, Tier& tier);  // will be: what is known of that stays
  void place(const Value& value);                    // anew among those that may leave
  void unplace(TensorValue& value, Tier& tier);
  Error failure_of(const TensorValue& value, IoOp op, const TensorTransfer::Failure& failure) const;
  std::span<std::byte> memory(const Extent& range) const { return arena_->memory().subspan(range.offset, range.bytes); }

  // All of it is in HBM then.
  Value bring_up(const std::string& name, Lock& lock);
  bool fetch_up(const Value& value);  // false: there is no room for it now
  // Brings it to `place`, which is its own then, or free again.
  void raise(const Value& value, const Extent& place, Lock& lock);
  // True: it is in host memory, checked; false: on NVMe, to be read by pieces.
  bool wait_below(const Value& value, Lock& lock);
  // It is in host memory, or on NVMe, then, and still in HBM; unless it is another thread's turn.
  void save_below(const Value& value, Lock& lock);
  void copy_down(const Value& value, Lock& lock);
  void copy_down_to(const Extent& host, const Value& value, Lock& lock);
  void pass_down(const Value& value, Lock& lock);
  // Runs copy() with the mutex free, while the value stays where it is.
  void relocate(const Value& value, Lock& lock, const std::function<void()>& copy);
  void move_ahead();  // a thread
  bool copy_behind(Lock& lock);

  const ::pid_t owner_;
  std::unique_ptr<HostArena> arena_;
  const Extent staging_;  // for what passes without staying
  std::unique_ptr<HbmMemory> device_;
  std::unique_ptr<TensorFiles> files_;
  std::unique_ptr<StoreThread> thread_;

  std::mutex staging_mutex_, commit_mutex_;  // taken before mutex_
  mutable std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ =
      std::make_unique<std::condition_variable>();  // something is not being copied or in use any more
  Tier host_, hbm_;
  std::map<std::string, Value> names_;
  std::vector<Value> moving_, leaving_;  // with a transfer; without a name, and still in use
  std::vector<Extent> after_commit_;     // parts that the newest commit names, and nothing else
  std::uint64_t clock_ = 0, unwritten_bytes_ = 0;
  bool changed_since_commit_ = false;
  TensorStoreStats stats_;
  // Warnings, for the log. Whoever hears them may call the store.
  mutable std::vector<std::string> to_say_;

  struct Rising {
    Value value;
    Extent place;
  };
  std::deque<Rising> risings_;  // that were prefetched, the next one first
  bool stopping_ = false;
  std::unique_ptr<std::condition_variable> ahead_ =
      std::make_unique<std::condition_variable>();  // there may be something to move ahead
  std::unique_ptr<std::thread> mover_;
};

// A call's hold on the mutex. What there is to say is said at its end, when the mutex is free.
class TieredTensors::Entry : public Lock {
 public:
  explicit Entry(const TieredTensors& store) : Lock(store.mutex_), store_(store) {}
  ~Entry() { store_.say(*this); }

 private:
  const TieredTensors& store_;
};

// While it lives, the mutex is free.
class TieredTensors::Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }

 private:
  Lock& lock_;
};

// While it lives, who looks for room waits for what is on its way to a place there.
class TieredTensors::Arriving {
 public:
  Arriving(TieredTensors& store, Tier& tier) : store_(store), tier_(tier) { ++tier_.arriving; }
  ~Arriving() {
    --tier_.arriving;
    store_.changed_->notify_all();
  }

 private:
  TieredTensors& store_;
  Tier& tier_;
};

// While it lives, memory and parts of the value stay where they are, and the mutex is free.
class TieredTensors::Use {
 public:
  Use(TieredTensors& store, Value value, Lock& lock) : store_(store), value_(std::move(value)), lock_(lock) {
    ++value_->users;
    lock_.unlock();
  }
  ~Use() {
    lock_.lock();
    --value_->users;
    store_.changed_->notify_all();
  }

 private:
  TieredTensors& store_;
  const Value value_;
  Lock& lock_;
};

}  // namespace spillway
