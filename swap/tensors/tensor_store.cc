#include "swap/tensors/tensor_store_impl.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "aio/directory.h"
#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kLeastBytes = kMiB, kMostStaging = 16 * kMiB;
constexpr double kLockPatienceSeconds = 10;
constexpr std::uint64_t kMostNvmeBytes = std::uint64_t{1} << 58;

// A quarter of a small budget, for what does not stay.
Extent staging_of(std::uint64_t host_bytes) {
  return {0, std::min(kMostStaging, host_bytes / 4 / kTensorAlignment * kTensorAlignment)};
}

IoQueueOptions queue_options(const TensorStoreOptions& options, const StripeMap& stripes) {
  return {.engine = options.io_engine,
          .block_bytes = options.io_block_bytes,
          .depth = options.io_depth,
          .stripes = &stripes};
}

[[noreturn]] void refuse_existing(const TensorStoreOptions& options) {
  throw Error(Code::kExists, options.paths.front().string(), "a store exists", 0, Remedy::kResumeOrReplace);
}

// One level: a drive that is not mounted is no new folder. Durable, as what comes to be in it.
void make_directory(const std::filesystem::path& path) {
  std::error_code failed;
  if (!std::filesystem::create_directory(path, failed) || failed) return;
  const std::filesystem::path whole = std::filesystem::absolute(path);
  const std::filesystem::path parent = whole.has_filename() ? whole.parent_path() : whole.parent_path().parent_path();
  if (const int error = sync_names(parent).error)
    throw Error(Code::kIo, {path.string(), "cannot be made durable", error, "check the drive"});
}

// Of stores that are replaced: no other process has one, and none is a training run's.
std::vector<File> lock_replaced(std::span<const std::filesystem::path> directories) {
  std::vector<File> files;
  for (const auto& directory : directories) {
    if (!StoreFiles::exist(std::span(&directory, 1))) continue;
    files.push_back(open_locked(directory / kStoreFileName, {.writable = true, .direct = true}, kLockPatienceSeconds));
    bool of_tensors = true;
    try {
      of_tensors = StoreFiles::superblock_of(files.back()).slots == kSlotsOfTensors;
    } catch (const Error& failure) {
      log(LogLevel::kWarning, failure.what() + std::string(": is replaced"));
    }
    if (!of_tensors)
      refuse_tensor(files.back().path().string(), "is the store of a training run",
                    "name another directory for tensors");
  }
  return files;
}

}  // namespace

void refuse_tensor(std::string object, std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument, {std::move(object), std::move(happened), 0, std::move(hint)});
}

void refuse_pinned(const std::string& name) {
  refuse_tensor(name, "is pinned in HBM, whose memory is in use", "unpin it first");
}

std::unique_ptr<TensorStore> TensorStore::open(const TensorStoreOptions& options) {
  if (options.host_bytes < kLeastBytes)
    refuse_tensor("host_bytes", fmt::format("is {}", options.host_bytes), "give it 1 MiB at least");
  if (options.hbm_bytes > 0 && options.hbm_bytes < kLeastBytes)
    refuse_tensor("hbm_bytes", fmt::format("is {}", options.hbm_bytes), "give it 1 MiB at least, or 0 for none");
  if (options.paths.empty()) return std::make_unique<TieredTensors>(options, nullptr);
  if (options.paths.size() > kMostStorePaths)
    refuse_tensor("paths", fmt::format("{} are named", options.paths.size()),
                  fmt::format("at most {}", kMostStorePaths));
  for (const auto& path : options.paths) make_directory(path);
  const bool exists = StoreFiles::exist(options.paths);
  if (exists && options.on_existing == OnExisting::kResume) {
    return std::make_unique<TieredTensors>(options, TensorFiles::open(options.paths, kLockPatienceSeconds));
  }
  if (exists && options.on_existing == OnExisting::kRefuse) refuse_existing(options);
  const std::vector<File> replaced = lock_replaced(options.paths);
  if (options.nvme_bytes == 0 || options.nvme_bytes > kMostNvmeBytes)
    refuse_tensor("nvme_bytes", fmt::format("is {}", options.nvme_bytes),
                  "say how much of the drives tensors may take");
  StoreFiles::remove_leftovers(options.paths, kLockPatienceSeconds);  // a killed run's may still be being written
  auto files = TensorFiles::create(options.paths, options.nvme_bytes);
  // Whoever has made a store in between has published it by now.
  if (!exists && StoreFiles::exist(options.paths)) refuse_existing(options);
  // A store is one from its first commit on, which has nothing in it; and it has its name once all else is there.
  auto draft = files->begin_commit({});
  files->make_commit(draft);
  files->end_commit(std::move(draft));
  TensorFiles& made = *files;
  auto store = std::make_unique<TieredTensors>(options, std::move(files));
  made.publish();
  return store;
}

TieredTensors::TieredTensors(const TensorStoreOptions& options, std::unique_ptr<TensorFiles> files)
    : owner_(::getpid()),
      arena_(std::make_unique<HostArena>(align_up(options.host_bytes, kTensorAlignment), kPinnedArena, kHugePageFiles,
                                         files ? HugePages::kOfAny : HugePages::kOfLargeArenas)),
      staging_(staging_of(arena_->memory().size())),
      device_(options.hbm_bytes == 0
                  ? nullptr
                  : std::make_unique<HbmMemory>(options.hbm_bytes, options.device, arena_->memory())),
      files_(std::move(files)),
      host_{.free = FreeRanges(staging_.bytes, arena_->memory().size()),
            .capacity = arena_->memory().size() - staging_.bytes,
            .key = "host_bytes",
            .held = &TensorValue::host},
      hbm_{.free = FreeRanges(0, options.hbm_bytes / kTensorAlignment * kTensorAlignment),
           .capacity = options.hbm_bytes / kTensorAlignment * kTensorAlignment,
           .key = "hbm_bytes",
           .held = &TensorValue::hbm} {
  if (files_) begin_with_files(options);
  if (device_) mover_ = std::make_unique<std::thread>([this] { move_ahead(); });
}

void TieredTensors::begin_with_files(const TensorStoreOptions& options) {
  thread_ = std::make_unique<StoreThread>(queue_options(options, files_->files().stripes()), files_->files().pointers(),
                                          std::vector<std::span<std::byte>>{arena_->memory()});
  for (ReadRecord& read : files_->take_tensors()) {
    auto value = std::make_shared<TensorValue>();
    value->name = read.name;
    value->record = std::move(read.record);
    value->on_nvme = value->committed = true;
    // A checksum is of a whole block, so the staging memory must have room for one.
    if (const std::uint64_t block = std::min(value->record.block_bytes, value->record.padded_bytes());
        block > staging_.bytes)
      throw Error(Code::kDoesNotFit, {read.name, fmt::format("was put with blocks of {} bytes", block), 0,
                                      fmt::format("give host_bytes of {} at the least", 4 * block)});
    names_[read.name] = std::move(value);
  }
}

TieredTensors::~TieredTensors() {
  if (::getpid() != owner_) {  // the threads are the parent's
    // Nor is anything else the child's: files hold a lock that both processes share, transfers wait for those threads.
    static_cast<void>(thread_.release());
    static_cast<void>(files_.release());
    static_cast<void>(device_.release());
    static_cast<void>(arena_.release());
    static_cast<void>(changed_.release());
    static_cast<void>(ahead_.release());
    static_cast<void>(mover_.release());
    static_cast<void>(new auto(std::tuple(std::move(names_), std::move(host_.turns), std::move(hbm_.turns),
                                          std::move(moving_), std::move(leaving_), std::move(risings_))));
    return;
  }
  Lock lock(mutex_);
  if (mover_) {
    stopping_ = true;
    ahead_->notify_all();
    lock.unlock();
    mover_->join();
    lock.lock();
  }
  // Transfers name memory of the arena: none may outlive it.
  while (!moving_.empty()) static_cast<void>(await(Value(moving_.front()), lock));
  say(lock);
  if (!files_ || !changed_since_commit_) return;
  log(LogLevel::kWarning, fmt::format("{}: closed without a commit: it is as it was at commit {}",
                                      files_->files().files().front().path().string(), files_->commits()));
}

void TieredTensors::refuse_fork() const {
  if (::getpid() == owner_) return;
  refuse_tensor("tensor store", fmt::format("belongs to process {}, which forked this one", owner_),
                "open a store in this process");
}

TieredTensors::Entry TieredTensors::enter() const {
  refuse_fork();
  return Entry(*this);
}

void TieredTensors::say(Lock& lock) const {
  if (!lock.owns_lock()) lock.lock();
  const std::vector<std::string> said = std::exchange(to_say_, {});
  lock.unlock();
  for (const std::string& message : said) log(LogLevel::kWarning, message);
}

const TieredTensors::Value& TieredTensors::find(const std::string& name) const {
  const auto found = names_.find(name);
  if (found != names_.end()) return found->second;
  throw Error(Code::kNotFound, {name, "is not in the store", 0, "list() has the names"});
}

void TieredTensors::install(const Value& value) {
  Value& named = names_[value->name];
  if (named) {
    // Pins are of the name: whoever pinned the old value holds the new one.
    value->host.pins = named->host.pins;
    retire(named);
  }
  named = value;
  changed_since_commit_ = true;
  touch(value);
}

void TieredTensors::check_place(Placement place) const {
  if (place == Placement::kHost || (place == Placement::kHbm && device_)) return;
  if (place == Placement::kNvme)
    refuse_tensor("tensor store", "places nothing on NVMe by itself",
                  "name host memory or HBM; commit() writes to NVMe");
  throw Error(Code::kUnsupported, {"tensor store", "has no HBM", 0, "give hbm_bytes when it is opened"});
}

std::size_t TieredTensors::prefetch(std::span<const std::string> names, Placement to) {
  Entry lock = enter();
  check_place(to);
  for (const std::string& name : names) find(name);
  std::size_t there = 0;
  for (const std::string& name : names) there += to == Placement::kHbm ? fetch_up(find(name)) : fetch(find(name));
  return there;
}

std::span<const std::byte> TieredTensors::pin(const std::string& name, Placement in) {
  Entry lock = enter();
  check_place(in);
  const bool hbm = in == Placement::kHbm;
  const Tier& tier = hbm ? hbm_ : host_;
  if (find(name)->record.padded_bytes() > tier.capacity)
    throw Error(Code::kDoesNotFit, {name, fmt::format("is larger than {}", hbm ? "HBM" : "host memory"), 0,
                                    fmt::format("raise {}", tier.key)});
  const Value value = hbm ? bring_up(name, lock) : bring_in(name, lock);
  TensorValue::Held& held = tier.of(*value);
  ++held.pins;
  return (hbm ? device_->memory(*held.at) : memory(*held.at)).first(value->record.bytes);
}

void TieredTensors::unpin(const std::string& name, Placement in) {
  Entry lock = enter();
  check_place(in);
  unsigned& pins = (in == Placement::kHbm ? hbm_ : host_).of(*find(name)).pins;
  if (pins == 0) refuse_tensor(name, "is not pinned", "unpin it as often as it was pinned");
  --pins;
  changed_->notify_all();
}

void TieredTensors::set_next_use(const std::string& name, std::optional<std::uint64_t> when) {
  Entry lock = enter();
  const Value& value = find(name);
  value->next_use = when;
  place(value);
}

void TieredTensors::remove(std::span<const std::string> names) {
  refuse_twice(names, [](const std::string& name) { return name; });
  Entry lock = enter();
  for (const std::string& name : names) {
    if (find(name)->hbm.pins > 0) refuse_pinned(name);
  }
  for (const std::string& name : names) {
    retire(find(name));
    names_.erase(name);
  }
}

std::uint64_t TieredTensors::commit() {
  refuse_fork();  // before any mutex, which a thread of the parent's may have
  const std::lock_guard one(commit_mutex_);
  Entry lock = enter();
  if (!files_)
    throw Error(Code::kUnsupported, {"commit", "the store is in host memory alone", 0, "name paths when it is opened"});
  files_->refuse_uncertain();
  // What is put from here on is of the next commit; what was is kept until this one is made.
  std::vector<Value> values;
  for (const auto& [name, value] : names_) values.push_back(value);
  // A user keeps the value where it is: a commit names where its bytes lie.
  for (const Value& value : values) ++value->users;
  const auto let_go = [&] {
    for (const Value& value : values) --value->users;
    changed_->notify_all();
  };
  std::vector<NamedRecord> table;
  std::optional<TensorFiles::Draft> begun;
  try {
    for (const Value& value : values) {
      changed_->wait(lock, [&] { return !value->filling; });
      if (!value->on_nvme && !value->transfer && value->host.at) start_write(value);
    }
    for (const Value& value : values) {
      while (!value->on_nvme) {
        changed_->wait(lock, [&] { return !value->relocating; });
        if (value->on_nvme) break;
        if (!value->host.at) {
          pass_down(value, lock);
          continue;
        }
        if (!value->transfer) start_write(value);
        if (auto error = await(value, lock)) throw *error;
      }
      table.push_back({value->name, &value->record});
    }
    // Every value is on the drive by now, and the users keep it there.
    begun = files_->begin_commit(table);
  } catch (...) {
    let_go();
    throw;
  }
  TensorFiles::Draft draft = std::move(*begun);
  std::vector<Extent> given_up = std::exchange(after_commit_, {});
  changed_since_commit_ = false;
  lock.unlock();
  std::exception_ptr failed;
  try {
    // Without the lock: it syncs, which takes long.
    files_->make_commit(draft);
  } catch (...) {
    failed = std::current_exception();
  }
  lock.lock();
  let_go();
  if (failed) {
    files_->abandon_commit(std::move(draft));
    after_commit_.insert(after_commit_.end(), given_up.begin(), given_up.end());
    changed_since_commit_ = true;
    std::rethrow_exception(failed);
  }
  files_->end_commit(std::move(draft));
  for (const Value& value : values) value->committed = true;
  // The commit before named these parts; from here on it is not the last one any more.
  for (const Extent& part : given_up) files_->free().give_back(part);
  ++stats_.commits;
  sweep();
  return files_->commits();
}

bool TieredTensors::contains(const std::string& name) const {
  const Entry lock = enter();
  return names_.contains(name);
}

TensorInfo TieredTensors::info_of(const TensorValue& value) const {
  return {.name = value.name,
          .shape = value.record.shape,
          .bytes = value.record.bytes,
          .in_host = value.in_host(),
          .on_nvme = value.on_nvme,
          .committed = value.committed,
          .pinned = value.host.pins > 0,
          .in_hbm = value.in_hbm(),
          .pinned_in_hbm = value.hbm.pins > 0};
}

TensorInfo TieredTensors::info(const std::string& name) const {
  const Entry lock = enter();
  return info_of(*find(name));
}

std::vector<TensorInfo> TieredTensors::list() const {
  const Entry lock = enter();
  std::vector<TensorInfo> all;
  for (const auto& [name, value] : names_) all.push_back(info_of(*value));
  return all;
}

TensorStoreStats TieredTensors::stats() const {
  const Entry lock = enter();
  TensorStoreStats now = stats_;
  now.host_capacity = host_.capacity;
  now.host_bytes = host_.capacity - host_.free.free_bytes();
  now.hbm_capacity = hbm_.capacity;
  now.hbm_bytes = hbm_.capacity - hbm_.free.free_bytes();
  if (files_) {
    now.nvme_capacity = files_->capacity();
    now.nvme_bytes = files_->capacity() - files_->free().free_bytes();
    now.io = thread_->stats();
  }
  return now;
}

std::optional<DeviceKind> TieredTensors::device() const {
  return device_ ? std::optional(device_->kind()) : std::nullopt;
}

}  // namespace spillway
