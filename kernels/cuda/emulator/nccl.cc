// NCCL on the emulated GPU: what a communicator asks of it, over sockets, so that ranks may be threads or processes.
//
// As with the real one, calls between ncclGroupStart() and ncclGroupEnd() are one, what is enqueued on a communicator
// runs in that order on whatever streams, and a rank that does not come is waited for until ncclCommAbort(). What the
// real one leaves undefined stops the program: ranks that do not make the same calls. Sums are added from the last rank
// to the first, which is not the tree's order.
#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/runtime.h"

namespace spillway::emulated {
namespace {

enum class Kind : std::uint32_t { kMessage, kBroadcast, kAllGather, kReduce, kReduceScatter };

struct Call {
  Kind kind;
  const std::byte* from = nullptr;  // null: this rank sends nothing
  std::byte* to = nullptr;          // null: it gets nothing
  std::size_t bytes = 0;
  int root = -1;  // or peer
};

// Ahead of each message, so that ranks that mean different ones are found.
struct Header {
  std::uint64_t group;
  Kind kind;
  std::uint64_t bytes;
};

using Bytes = std::vector<std::byte>;

void append(Bytes& to, const void* from, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  to.insert(to.end(), begin, begin + bytes);
}

// What goes to a rank, and what comes from it.
struct Traffic {
  Bytes out, in;
  std::size_t sent = 0, come = 0;
  bool over() const { return sent == out.size() && come == in.size(); }
};

sockaddr_un address_of(const std::string& folder, int rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s/%d", folder.c_str(), rank);
  return address;
}

}  // namespace
}  // namespace spillway::emulated

using namespace spillway::emulated;

struct ncclComm {
  std::shared_ptr<struct CommState> state;
};

struct CommState {
  std::string folder;
  int rank = 0, ranks = 1;
  std::vector<int> sockets;  // by rank
  std::atomic<bool> aborted = false;
  std::atomic<ncclResult_t> result = ncclInProgress;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t enqueued = 0, over = 0;  // groups

  ~CommState() {
    for (const int socket : sockets) ::close(socket);
    ::unlink(address_of(folder, rank).sun_path);
    ::rmdir(folder.c_str());  // the last one
  }
  bool stops() const { return aborted || has_died(); }
};

namespace {

using State = std::shared_ptr<CommState>;
using namespace std::chrono_literals;

bool write_all(int to, const void* data, std::size_t bytes) {
  return ::send(to, data, bytes, MSG_NOSIGNAL) == ssize_t(bytes);
}

// Each rank connects to those below it, and says who it is.
void meet(const State& state) {
  CommState& comm = *state;
  const auto give_up = [&] { comm.result = ncclSystemError; };
  const int listening = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un own = address_of(comm.folder, comm.rank);
  if (::bind(listening, reinterpret_cast<sockaddr*>(&own), sizeof own) != 0 || ::listen(listening, comm.ranks) != 0)
    return give_up();
  for (int below = 0; below < comm.rank; ++below) {
    sockaddr_un address = address_of(comm.folder, below);
    const int to = ::socket(AF_UNIX, SOCK_STREAM, 0);
    while (::connect(to, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      if (comm.stops()) return give_up();
      std::this_thread::sleep_for(1ms);
    }
    if (!write_all(to, &comm.rank, sizeof comm.rank)) return give_up();
    comm.sockets[below] = to;
  }
  for (int come = comm.rank + 1; come < comm.ranks;) {
    pollfd ready{listening, POLLIN, 0};
    if (comm.stops()) return give_up();
    if (::poll(&ready, 1, 5) != 1) continue;
    const int from = ::accept(listening, nullptr, nullptr);
    int rank = -1;
    if (::recv(from, &rank, sizeof rank, MSG_WAITALL) != sizeof rank || rank < 0 || rank >= comm.ranks)
      return give_up();
    comm.sockets[rank] = from;
    ++come;
  }
  ::close(listening);
  comm.result = ncclSuccess;
}

// False: it was aborted.
bool exchange(CommState& comm, std::vector<Traffic>& with) {
  while (!comm.stops()) {
    std::vector<pollfd> waiting;
    std::vector<int> ranks;
    for (int rank = 0; rank < comm.ranks; ++rank) {
      const Traffic& traffic = with[rank];
      if (rank == comm.rank || traffic.over()) continue;
      const int events =
          (traffic.sent < traffic.out.size() ? POLLOUT : 0) | (traffic.come < traffic.in.size() ? POLLIN : 0);
      waiting.push_back({comm.sockets[rank], static_cast<short>(events), 0});
      ranks.push_back(rank);
    }
    if (waiting.empty()) return true;
    ::poll(waiting.data(), waiting.size(), 5);
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      Traffic& traffic = with[ranks[i]];
      ssize_t moved = 0;
      if (waiting[i].revents & POLLOUT) {
        moved = ::send(waiting[i].fd, traffic.out.data() + traffic.sent, traffic.out.size() - traffic.sent,
                       MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved > 0) traffic.sent += static_cast<std::size_t>(moved);
      }
      if (waiting[i].revents & (POLLIN | POLLHUP)) {
        moved = ::recv(waiting[i].fd, traffic.in.data() + traffic.come, traffic.in.size() - traffic.come, MSG_DONTWAIT);
        if (moved > 0) traffic.come += static_cast<std::size_t>(moved);
        if (moved == 0 && traffic.come < traffic.in.size()) comm.result = ncclRemoteError;
      }
      if (moved < 0 && errno != EAGAIN && errno != EWOULDBLOCK) comm.result = ncclRemoteError;
      if (comm.result == ncclRemoteError) std::this_thread::sleep_for(5ms);
    }
  }
  return false;
}

// What this rank sends to `peer` and gets from it in a call: bytes, and from where on.
struct Ways {
  const std::byte* out = nullptr;
  bool in = false;
};
Ways ways_of(const CommState& comm, const Call& call, int peer) {
  const bool is_root = call.root == comm.rank, to_root = call.root == peer;
  switch (call.kind) {
    case Kind::kMessage: return to_root ? Ways{call.from, call.to != nullptr} : Ways{};
    case Kind::kBroadcast: return is_root ? Ways{call.from, false} : Ways{nullptr, to_root};
    case Kind::kAllGather: return {call.from, true};
    case Kind::kReduce: return is_root ? Ways{nullptr, true} : Ways{to_root ? call.from : nullptr, false};
    case Kind::kReduceScatter: return {call.from + static_cast<std::size_t>(peer) * call.bytes, true};
  }
  return {};
}

void add(const std::byte* values, Bytes& sum) {
  for (std::size_t at = 0; at < sum.size(); at += sizeof(float)) {
    float a = 0, b = 0;
    std::memcpy(&a, sum.data() + at, sizeof a);
    std::memcpy(&b, values + at, sizeof b);
    a += b;
    std::memcpy(sum.data() + at, &a, sizeof a);
  }
}

// `brought`: of every rank, what it sent in this call; null: nothing.
void end(const CommState& comm, const Call& call, const std::vector<const std::byte*>& brought) {
  const bool is_root = call.root == comm.rank;
  const std::size_t bytes = call.bytes;
  switch (call.kind) {
    case Kind::kMessage:
      if (call.to != nullptr) std::memcpy(call.to, brought[call.root], bytes);
      return;
    case Kind::kBroadcast:
      if (is_root && call.to != call.from) std::memcpy(call.to, call.from, bytes);
      if (!is_root) std::memcpy(call.to, brought[call.root], bytes);
      return;
    case Kind::kAllGather:
      for (int rank = 0; rank < comm.ranks; ++rank) {
        const std::byte* from = rank == comm.rank ? call.from : brought[rank];
        std::memmove(call.to + static_cast<std::size_t>(rank) * bytes, from, bytes);
      }
      return;
    case Kind::kReduce:
      if (!is_root) return;
      break;
    case Kind::kReduceScatter: break;
  }
  const std::byte* own =
      call.kind == Kind::kReduce ? call.from : call.from + static_cast<std::size_t>(comm.rank) * bytes;
  Bytes sum(bytes);
  for (int rank = comm.ranks; rank-- > 0;) add(rank == comm.rank ? own : brought[rank], sum);
  std::memcpy(call.to, sum.data(), bytes);
}

void run_group(CommState& comm, const std::vector<Call>& calls, std::uint64_t group) {
  std::vector<Traffic> with(comm.ranks);
  on_device([&] {
    for (const Call& call : calls) {
      const Header header{group, call.kind, call.bytes};
      for (int peer = 0; peer < comm.ranks; ++peer) {
        if (peer == comm.rank) continue;
        const Ways ways = ways_of(comm, call, peer);
        if (ways.out != nullptr) {
          append(with[peer].out, &header, sizeof header);
          append(with[peer].out, ways.out, call.bytes);
        }
        if (ways.in) with[peer].in.resize(with[peer].in.size() + sizeof header + call.bytes);
      }
    }
  });
  if (!exchange(comm, with)) return;
  on_device([&] {
    std::vector<std::size_t> at(comm.ranks);
    for (const Call& call : calls) {
      std::vector<const std::byte*> brought(comm.ranks);
      for (int peer = 0; peer < comm.ranks; ++peer) {
        if (peer == comm.rank || !ways_of(comm, call, peer).in) continue;
        Header header{};
        std::memcpy(&header, with[peer].in.data() + at[peer], sizeof header);
        if (header.group != group || header.kind != call.kind || header.bytes != call.bytes)
          stop("ranks do not make the same calls of NCCL's");
        brought[peer] = with[peer].in.data() + at[peer] + sizeof header;
        at[peer] += sizeof header + call.bytes;
      }
      end(comm, call, brought);
    }
  });
}

void run(const State& state, const std::vector<Call>& calls, std::uint64_t group) {
  std::unique_lock lock(state->mutex);
  while (state->over != group && !state->stops()) state->changed.wait_for(lock, 5ms);
  lock.unlock();
  if (!state->stops()) run_group(*state, calls, group);
  lock.lock();
  ++state->over;
  state->changed.notify_all();
}

// Calls of this thread between ncclGroupStart() and ncclGroupEnd().
struct Group {
  int depth = 0;
  std::vector<Call> calls;
  State state;
  cudaStream_t stream = nullptr;
};
thread_local Group open_group;

void launch(Group& group) {
  const State state = group.state;
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(state->mutex);
    number = state->enqueued++;
  }
  enqueue(group.stream, [state, number, calls = std::move(group.calls)] { run(state, calls, number); });
}

bool is_on_device(const Call& call, int ranks, int rank) {
  const auto lies = [](const std::byte* data, std::size_t bytes) {
    return data == nullptr || in_device_memory(data, bytes);
  };
  const std::size_t all = call.bytes * static_cast<std::size_t>(ranks);
  const bool reads_all = call.kind == Kind::kReduceScatter, writes_all = call.kind == Kind::kAllGather;
  const bool is_root = call.root == rank;
  if (call.kind == Kind::kBroadcast && !is_root) return lies(call.to, call.bytes);
  if (call.kind == Kind::kReduce && !is_root) return lies(call.from, call.bytes);
  return lies(call.from, reads_all ? all : call.bytes) && lies(call.to, writes_all ? all : call.bytes);
}

ncclResult_t add_call(const char* name, const Call& call, ncclComm_t comm, cudaStream_t stream) {
  if (enter(name, stream == nullptr ? "default stream" : "") != cudaSuccess) return ncclUnhandledCudaError;
  const State& state = comm->state;
  if (state->result == ncclInProgress) return ncclInvalidUsage;
  if (call.root >= state->ranks || !is_on_device(call, state->ranks, state->rank)) return ncclInvalidArgument;
  Group& group = open_group;
  if (!group.calls.empty() && (group.state != state || group.stream != stream))
    stop("a group of calls is for one communicator and one stream");
  group.state = state;
  group.stream = stream;
  group.calls.push_back(call);
  if (group.depth == 0) launch(group);
  return ncclSuccess;
}

std::size_t size_of(ncclDataType_t type) {
  if (type == ncclInt8) return 1;
  if (type == ncclFloat32) return 4;
  stop("a type that the emulated NCCL does not have");
}
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::snprintf(id->internal, sizeof id->internal, "/tmp/emulated_nccl_XXXXXX");
  return ::mkdtemp(id->internal) == nullptr ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (enter("ncclCommInitRank") != cudaSuccess) return ncclUnhandledCudaError;
  if (config == nullptr || config->blocking != 0) stop("the emulated NCCL does not block");
  const auto state = std::make_shared<CommState>();
  state->folder = id.internal;
  state->rank = rank;
  state->ranks = ranks;
  state->sockets.assign(static_cast<std::size_t>(ranks), -1);
  *comm = new ncclComm{state};
  std::thread(meet, state).detach();
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  return *result = comm->state->result, ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->state->aborted = true;
  delete comm;
  return ncclSuccess;
}

// Until what is enqueued has run.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const State& state = comm->state;
  std::unique_lock lock(state->mutex);
  while (state->over < state->enqueued && !state->stops()) state->changed.wait_for(lock, 5ms);
  return state->result;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--open_group.depth == 0 && !open_group.calls.empty()) launch(open_group);
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add_call("ncclSend", {Kind::kMessage, bytes(from), nullptr, count * size_of(type), peer}, comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add_call("ncclRecv", {Kind::kMessage, nullptr, bytes(to), count * size_of(type), peer}, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return add_call("ncclBroadcast", {Kind::kBroadcast, bytes(from), bytes(to), count * size_of(type), root}, comm,
                  stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return add_call("ncclAllGather", {Kind::kAllGather, bytes(from), bytes(to), count * size_of(type)}, comm, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  if (op != ncclSum || type != ncclFloat32) return ncclInvalidArgument;
  return add_call("ncclReduce", {Kind::kReduce, bytes(from), bytes(to), count * size_of(type), root}, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  if (op != ncclSum || type != ncclFloat32) return ncclInvalidArgument;
  return add_call("ncclReduceScatter", {Kind::kReduceScatter, bytes(from), bytes(to), count * size_of(type)}, comm,
                  stream);
}

}  // extern "C"
