#include "src/comm/cuda/nccl_mover.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/cuda/check.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/comm/cuda/tree_sum.h"

namespace spillway::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPollEvery{250};
constexpr std::chrono::seconds kCallTakes{1};      // the longest that a call of NCCL's, asked not to block, may take
constexpr std::chrono::seconds kAbandonTakes{10};  // until streams have come by what was abandoned
constexpr milliseconds kAbortBegins{10};
constexpr std::uint64_t kLeastChunk = 4 * kKiB;

// Of each slice, of several slices in one group. Not tiny where there are many ranks and only one has something.
std::uint64_t slice_chunk(const NcclOptions& options) {
  const std::uint64_t least = std::min<std::uint64_t>(options.limits.piece_bytes, 64 * kKiB);
  return align_up(std::max<std::uint64_t>(options.limits.piece_bytes / options.ranks, least), sizeof(float));
}

std::uint64_t tree_chunk_of(const NcclOptions& options) {
  if (options.ranks == 1) return 0;
  return std::max(align_down(options.limits.scratch_bytes / (options.ranks - 1), kLeastChunk), kLeastChunk);
}

// `ncclSend: unhandled system error: …`
std::string text_of(const char* what, ncclResult_t result, ncclComm_t comm) {
  const char* more = comm != nullptr ? ncclGetLastError(comm) : "";
  return fmt::format("{}: {}{}{}", what, ncclGetErrorString(result), *more == 0 ? "" : ": ", more);
}

bool are_equal(std::span<const std::uint64_t> slices) {
  return std::ranges::all_of(slices, [&](std::uint64_t slice) { return slice == slices[0]; });
}

std::uint64_t longest_of(std::span<const std::uint64_t> slices) { return *std::ranges::max_element(slices); }

}  // namespace

NcclMover::NcclMover(const NcclOptions& options)
    : rank_(options.rank),
      ranks_(options.ranks),
      limits_(options.limits),
      patience_(options.patience_seconds),
      tree_chunk_bytes_(tree_chunk_of(options)),
      slice_chunk_bytes_(slice_chunk(options)),
      polled_(Clock::now()) {
  SPILLWAY_CHECK(ranks_ <= kMostTreeParts, "2^16 ranks are the most");
  try {
    write_value_ = driver_function<decltype(write_value_)>("cuStreamWriteValue32");
    wait_value_ = driver_function<decltype(wait_value_)>("cuStreamWaitValue32");
    check(cudaStreamCreateWithFlags(&watched_, cudaStreamNonBlocking), "creating a stream");
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(Marks), cudaHostAllocDefault), "reserving pinned host memory");
    marks_ = new (memory) Marks{};
    if (ranks_ == 1) return;
    check(cudaMalloc(&memory, tree_chunk_bytes_ * (ranks_ - 1)), "reserving memory for sums over ranks");
    scratch_ = static_cast<std::byte*>(memory);
    check(cudaEventCreateWithFlags(&added_, cudaEventDisableTiming), "creating an event");
  } catch (...) {
    release();
    throw;
  }
}

NcclMover::~NcclMover() {
  const Context::Use use(context_);
  if (comm_ != nullptr) static_cast<void>(ncclCommAbort(comm_));
  release();
}

void NcclMover::release() noexcept {
  const Context::Use use(context_);
  if (scratch_ != nullptr) static_cast<void>(cudaFree(std::exchange(scratch_, nullptr)));
  if (added_ != nullptr) static_cast<void>(cudaEventDestroy(std::exchange(added_, nullptr)));
  if (marks_ != nullptr) static_cast<void>(cudaFreeHost(std::exchange(marks_, nullptr)));
  if (watched_ != nullptr) static_cast<void>(cudaStreamDestroy(std::exchange(watched_, nullptr)));
}

void NcclMover::connect(const NcclId& id) {
  static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof unique);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  // Those that are through wait for this one with all of their patience, and are to hear what it has to say.
  const auto patience = patience_ / 2;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
  const Context::Use use(context_);
  const Lock lock(mutex_);
  ncclResult_t result =
      ncclCommInitRankConfig(&comm_, static_cast<int>(ranks_), unique, static_cast<int>(rank_), &config);
  while (result == ncclInProgress && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
    result = state();
  }
  if (result == ncclSuccess) return;
  throw Error(Code::kIo,
              {"communicator nccl",
               result == ncclInProgress ? fmt::format("not all ranks have come to open it in {:g} s", patience.count())
                                        : text_of("ncclCommInitRankConfig", result, comm_),
               0, "give each rank a GPU of its own; NCCL_DEBUG=WARN says more"});
}

std::string NcclMover::library() const {
  int version = 0;
  static_cast<void>(ncclGetVersion(&version));
  return fmt::format("NCCL {}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

NcclMover::Mark NcclMover::seen(const Mark& mark) noexcept {
  return std::atomic_ref(const_cast<Mark&>(mark)).load(std::memory_order_acquire);
}

bool NcclMover::has_come(std::uint64_t number) const { return seen(marks_->come[number % kPlaces]) == mark_of(number); }
bool NcclMover::is_over(std::uint64_t number) const { return seen(marks_->over[number % kPlaces]) == mark_of(number); }

std::uint64_t NcclMover::marks() const {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    sum = sum * 31 + seen(marks_->come[i]) + seen(marks_->over[i]) + seen(marks_->pieces[i]);
  }
  return sum;
}

void NcclMover::open_gates(std::uint64_t below) {
  if (!abandoned_) std::atomic_ref(marks_->gates).store(static_cast<Mark>(below), std::memory_order_release);
}

void NcclMover::write(Mark& mark, Mark value, cudaStream_t stream) const {
  check_driver(write_value_(stream, reinterpret_cast<CUdeviceptr>(&mark), value, 0), "marking a stream's place");
}

void NcclMover::enqueue(std::uint64_t number, const Collective& call, Stream& stream) noexcept {
  const auto to = static_cast<cudaStream_t>(stream.native());
  const std::size_t place = number % kPlaces;
  const Context::Use use(context_);
  Lock lock(mutex_);
  if (abandoned_ || failed_) return;
  try {
    write(marks_->come[place], mark_of(number), to);
    latest_ = number;
    enqueued_[place] = mark_of(number);
    const auto gate = reinterpret_cast<CUdeviceptr>(&marks_->gates);
    check_driver(wait_value_(to, gate, mark_of(number), CU_STREAM_WAIT_VALUE_GEQ), "a stream's gate");
    try {
      if (ranks_ > 1) move({call, to, marks_->pieces[place], pieces_[place], lock});
    } catch (const Abandoned&) {
    } catch (const Error& error) {
      fail(error.what());
    }
    write(marks_->over[place], mark_of(number), to);
  } catch (const Error& error) {
    fail(error.what());
    gpu_failed_ = true;
  }
}

void NcclMover::move(const Piece& piece) {
  switch (piece.call.kind) {
    case CollectiveKind::kAllGather: return gather(piece);
    case CollectiveKind::kReduceScatter:
      return piece.call.sums == Sums::kTree ? add_in_tree(piece) : add_fastest(piece);
    case CollectiveKind::kBroadcast: return broadcast(piece);
    case CollectiveKind::kOpen:
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBarrier: return;
  }
}

NcclMover::Part NcclMover::part(const Collective& call, std::uint32_t rank, std::uint64_t chunk,
                                std::uint64_t chunk_bytes) const {
  std::uint64_t begin = 0;
  for (std::uint32_t before = 0; before < rank; ++before) begin += call.slices[before];
  const std::uint64_t from = std::min(chunk * chunk_bytes, call.slices[rank]);
  return {call.data.data() + begin + from, std::min(chunk_bytes, call.slices[rank] - from)};
}

template <typename Calls>
void NcclMover::group(const Piece& piece, Calls calls) {
  if (abandoned_) throw Abandoned{};
  ncclResult_t first = ncclGroupStart();
  const char* what = "ncclGroupStart";
  calls([&](const char* call, ncclResult_t result) {
    if (first != ncclSuccess || result == ncclSuccess || result == ncclInProgress) return;
    first = result;
    what = call;
  });
  const ncclResult_t end = ncclGroupEnd();
  wait_accepted(first != ncclSuccess ? first : end, first != ncclSuccess ? what : "ncclGroupEnd", piece.lock);
  write(piece.mark, ++piece.written, piece.stream);
}

// A piece for each chunk, of calls for what a rank's slice has of it: move(made, rank, part).
template <typename Move>
void NcclMover::slice_by_slice(const Piece& piece, Move move) {
  const std::uint64_t chunks = div_up(longest_of(piece.call.slices), slice_chunk_bytes_);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    group(piece, [&](auto made) {
      for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
        const Part of_rank = part(piece.call, rank, chunk, slice_chunk_bytes_);
        if (of_rank.bytes > 0) move(made, static_cast<int>(rank), of_rank);
      }
    });
  }
}

// All slices in one call where they are alike, else from each rank to all.
void NcclMover::gather(const Piece& piece) {
  const Collective& call = piece.call;
  if (are_equal(call.slices) && call.data.size() <= limits_.direct_bytes) {
    const Part own = part(call, rank_, 0, call.slices[rank_]);
    if (own.bytes == 0) return;
    return group(piece, [&](auto made) {
      made("ncclAllGather", ncclAllGather(own.data, call.data.data(), own.bytes, ncclInt8, comm_, piece.stream));
    });
  }
  slice_by_slice(piece, [&](auto made, int rank, const Part& part) {
    made("ncclBroadcast", ncclBroadcast(part.data, part.data, part.bytes, ncclInt8, rank, comm_, piece.stream));
  });
}

void NcclMover::add_fastest(const Piece& piece) {
  const Collective& call = piece.call;
  if (are_equal(call.slices) && call.data.size() <= limits_.direct_bytes) {
    const Part own = part(call, rank_, 0, call.slices[rank_]);
    if (own.bytes == 0) return;
    return group(piece, [&](auto made) {
      made("ncclReduceScatter", ncclReduceScatter(call.data.data(), own.data, own.bytes / sizeof(float), ncclFloat32,
                                                  ncclSum, comm_, piece.stream));
    });
  }
  slice_by_slice(piece, [&](auto made, int rank, const Part& part) {
    made("ncclReduce",
         ncclReduce(part.data, part.data, part.bytes / sizeof(float), ncclFloat32, ncclSum, rank, comm_, piece.stream));
  });
}

// Every other rank's part of the own slice comes into scratch memory and is added up, chunk by chunk. NCCL orders its
// own work on several streams, and not the sums between. Where 16 bits travel, a rank's place in scratch memory is cut
// in two: what comes from it, and what goes to it.
void NcclMover::add_in_tree(const Piece& piece) {
  const Collective& call = piece.call;
  const std::uint64_t chunks = div_up(longest_of(call.slices), tree_chunk_bytes_);
  const bool is_narrow = call.wire != DType::kFloat32;
  const auto place = [&](std::uint32_t rank) { return scratch_ + (rank - (rank > rank_)) * tree_chunk_bytes_; };
  const auto travelling = [&](std::uint64_t bytes) { return bytes / sizeof(float) * size_of(call.wire); };
  const auto goes = [&](std::uint32_t to, const Part& theirs) {
    return is_narrow ? place(to) + tree_chunk_bytes_ / 2 : theirs.data;
  };
  check(cudaStreamWaitEvent(piece.stream, added_, 0), "waiting for an event");
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const Part own = part(call, rank_, chunk, tree_chunk_bytes_);
    for (std::uint32_t to = 0; is_narrow && to < ranks_; ++to) {
      if (to == rank_) continue;
      const Part theirs = part(call, to, chunk, tree_chunk_bytes_);
      narrow(reinterpret_cast<const float*>(theirs.data), goes(to, theirs), call.wire, theirs.bytes / sizeof(float),
             piece.stream);
    }
    group(piece, [&](auto made) {
      for (std::uint32_t i = 1; i < ranks_; ++i) {
        const std::uint32_t from = (rank_ + ranks_ - i) % ranks_, to = (rank_ + i) % ranks_;
        if (own.bytes > 0) {
          made("ncclRecv",
               ncclRecv(place(from), travelling(own.bytes), ncclInt8, static_cast<int>(from), comm_, piece.stream));
        }
        const Part theirs = part(call, to, chunk, tree_chunk_bytes_);
        if (theirs.bytes > 0) {
          made("ncclSend", ncclSend(goes(to, theirs), travelling(theirs.bytes), ncclInt8, static_cast<int>(to), comm_,
                                    piece.stream));
        }
      }
    });
    sum_in_tree({.own = reinterpret_cast<float*>(own.data),
                 .received = scratch_,
                 .wire = call.wire,
                 .stride = tree_chunk_bytes_ / size_of(call.wire),
                 .rank = rank_,
                 .ranks = ranks_},
                own.bytes / sizeof(float), piece.stream);
  }
  check(cudaEventRecord(added_, piece.stream), "recording an event");
}

void NcclMover::broadcast(const Piece& piece) {
  const Collective& call = piece.call;
  for (std::size_t at = 0; at < call.data.size(); at += limits_.piece_bytes) {
    const auto data = call.data.subspan(at, std::min(limits_.piece_bytes, call.data.size() - at));
    group(piece, [&](auto made) {
      made("ncclBroadcast", ncclBroadcast(data.data(), data.data(), data.size(), ncclInt8, static_cast<int>(call.root),
                                          comm_, piece.stream));
    });
  }
}

ncclResult_t NcclMover::state() const {
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
  return asked != ncclSuccess ? asked : result;
}

void NcclMover::wait_accepted(ncclResult_t result, const char* what, Lock& lock) {
  constexpr int kSpins = 1000;  // mostly it is at it for microseconds
  for (int i = 0; i < kSpins && result == ncclInProgress; ++i) result = state();
  while (result == ncclInProgress) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
    if (abandoned_) throw Abandoned{};
    result = state();
  }
  if (result != ncclSuccess && result != ncclRemoteError)
    throw Error(Code::kIo, {"NCCL", text_of(what, result, comm_), 0, ""});
}

// The first one counts.
void NcclMover::fail(const std::string& why) {
  if (!failed_) failure_ = why;
  failed_ = true;
}

std::string NcclMover::failure() {
  if (Clock::now() - polled_ > kPollEvery) poll_health();
  if (!failed_) return {};
  const Lock lock(mutex_);
  return failure_;
}

// That another rank is lost is not NCCL's to say: the words that do not come from it name it.
void NcclMover::poll_health() {
  polled_ = Clock::now();
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock || abandoned_) return;
  const Context::Use use(context_);
  try {
    const RelaxedCapture relaxed;
    is_done(cudaStreamQuery(watched_));
  } catch (const Error& error) {
    fail(error.what());
    gpu_failed_ = true;
    return;
  }
  const ncclResult_t now = state();
  if (now == ncclRemoteError && !std::exchange(told_remote_, true))
    log(LogLevel::kWarning, "communicator: " + text_of("NCCL misses a rank", now, comm_));
  if (now != ncclSuccess && now != ncclInProgress && now != ncclRemoteError) fail(text_of("NCCL", now, comm_));
}

// NCCL's kernels see that they are to end before they begin, so that gates let no data through.
void NcclMover::abandon() noexcept {
  const Lock lock = [&] {
    Lock trying(mutex_, std::defer_lock);
    const Clock::time_point end = Clock::now() + kCallTakes;
    while (!trying.try_lock() && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    return trying;
  }();
  if (abandoned_.exchange(true)) return;
  std::thread([comm = std::exchange(comm_, nullptr), aborted = aborted_, context = context_] {
    const Context::Use use(context);
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    *aborted = true;
  }).detach();
  std::this_thread::sleep_for(kAbortBegins);
  constexpr Mark kBeyondAll = Mark{1} << 30;
  std::atomic_ref(marks_->gates).store(mark_of(latest_) + kBeyondAll, std::memory_order_release);
}

bool NcclMover::close() noexcept {
  const Context::Use use(context_);
  if (!abandoned_) {
    const Lock lock(mutex_);
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience_);
    ncclResult_t result = ncclCommFinalize(comm_);
    while (result == ncclInProgress && Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
      result = state();
    }
    if (result == ncclSuccess) {
      static_cast<void>(ncclCommDestroy(std::exchange(comm_, nullptr)));
      release();
      return true;
    }
  }
  abandon();
  const auto have_passed = [&] {
    for (std::size_t i = 0; i < kPlaces; ++i) {
      if (seen(marks_->over[i]) != enqueued_[i]) return false;
    }
    return aborted_->load();
  };
  const Clock::time_point end = Clock::now() + kAbandonTakes;
  while (!gpu_failed_ && Clock::now() < end) {
    if (have_passed()) {
      release();
      return true;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

}  // namespace spillway::cuda
