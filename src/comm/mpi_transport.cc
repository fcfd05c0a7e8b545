// The transport over MPI, all of libspillway_mpi.so.
//
// Threads: MPI is called by the communicator's thread and, at the opening, by the thread that makes it; never by two at
// a time, since one lock is around all of it. So MPI_THREAD_SERIALIZED is what it takes: less (FUNNELED) would bind us
// to the thread that initialized MPI, which is the program's, and MULTIPLE has MPI lock inside what is never contended.
// A program that calls MPI itself while a communicator is open needs MULTIPLE for its own calls beside ours. Nothing
// that blocks until another rank does something is called but MPI_Init and, at a good end, MPI_Finalize: a rank that is
// lost is then the launcher's to find.
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "spillway/error.h"
#include "spillway/version.h"
#include "src/comm/mpi_plugin.h"

namespace spillway::mpi {
namespace {

std::timed_mutex& calls() {
  static std::timed_mutex one;
  return one;
}

std::string text_of(int error) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(error, text, &length) != MPI_SUCCESS) return "error " + std::to_string(error);
  return {text, static_cast<std::size_t>(length)};
}

std::string library_name() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find(','));  // `Open MPI v4.1.4, package: …`
}

[[noreturn]] void unsupported(const std::string& why, const std::string& remedy) {
  throw Error(Code::kUnsupported, {"communicator mpi", why, 0, remedy});
}

// Of the process: communicators that are open, and whether one of them has ended badly. MPI_Finalize waits for all
// ranks, so it is called only where all of them are known to have left in peace; where they have not, the launcher sees
// a process end without it, and ends the rest.
struct Process {
  int open = 0;
  bool lost = false;
};
Process& process() {
  static Process one;
  return one;
}

void finalize_at_exit() {
  const std::unique_lock lock(calls(), std::try_to_lock);
  if (!lock) return;  // a call that has not come back, in a communicator that was left for it
  int finalized = 0;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && !finalized && process().open == 0 && !process().lost) MPI_Finalize();
}

void initialize(bool programs_own) {
  // Open MPI opens plugins of its own that look for its symbols among those of all.
  ::dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  int initialized = 0, finalized = 0, provided = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized) unsupported("MPI is finalized in this process", "keep a communicator of MPI's until the end");
  if (!initialized && programs_own) {
    unsupported(library_name() + " is not initialized: the program's communicator is of another MPI",
                "link the program with that one, and call MPI_Init_thread first");
  }
  if (!initialized) {
    if (const int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided)) {
      unsupported("MPI does not start: " + text_of(error), "see what mpirun says");
    }
    std::atexit(finalize_at_exit);
  }
  MPI_Query_thread(&provided);
  if (provided < MPI_THREAD_SERIALIZED) {
    unsupported("MPI was initialized for one thread, and the communicator uses a second",
                "call MPI_Init_thread with MPI_THREAD_SERIALIZED, or with MPI_THREAD_MULTIPLE if the program calls "
                "MPI while the communicator is open");
  }
}

// The program's communicator, or all processes', with messages of our own.
MPI_Comm duplicate(MPI_Comm comm, double patience_seconds) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  int error = MPI_Comm_idup(comm, &own, &request), done = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_seconds);
  while (error == MPI_SUCCESS && !done) {
    error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done || error != MPI_SUCCESS) break;
    if (std::chrono::steady_clock::now() > end) {
      process().lost = true;
      throw Error(Code::kIo,
                  {"communicator mpi", "not all ranks have come to open it", 0,
                   "look at what ended or stopped them, and at the network: where hosts have several, or "
                   "containers, mpirun --mca btl_tcp_if_include ADDRESS/BITS names the one that joins them"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (error == MPI_SUCCESS) error = MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
  if (error != MPI_SUCCESS) throw Error(Code::kIo, {"communicator mpi", "MPI_Comm_idup: " + text_of(error), 0, ""});
  return own;
}

int count_of(std::size_t size) {
  SPILLWAY_CHECK(size <= INT_MAX, "MPI counts in int");
  return static_cast<int>(size);
}

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const MpiOptions& options) {
    const std::unique_lock lock(calls(), std::chrono::duration<double>(options.patience_seconds));
    if (!lock) {
      throw Error(Code::kIo, {"communicator mpi", "a call of an earlier communicator has not come back from MPI", 0,
                              "start all ranks again"});
    }
    initialize(options.comm.has_value());
    const MPI_Comm comm = options.comm ? MPI_Comm_f2c(*options.comm) : MPI_COMM_WORLD;
    if (comm == MPI_COMM_NULL) {
      throw Error(Code::kInvalidArgument, {"communicator mpi", "the program's communicator is MPI_COMM_NULL", 0,
                                           "make one only on the ranks that belong to it"});
    }
    comm_ = duplicate(comm, options.patience_seconds);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &ranks_);
    library_ = library_name();
    ++process().open;
  }

  std::uint32_t rank() const noexcept override { return static_cast<std::uint32_t>(rank_); }
  std::uint32_t ranks() const noexcept override { return static_cast<std::uint32_t>(ranks_); }
  std::string library() const override { return library_; }
  std::string host() const override {
    char name[65] = {};
    return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
  }
  std::size_t most_bytes() const noexcept override { return INT_MAX; }

  void send(std::uint32_t to, Channel channel, std::span<const std::byte> data, Ticket ticket) override {
    begin(ticket, 0, false, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(data.data(), count_of(data.size()), MPI_BYTE, static_cast<int>(to), static_cast<int>(channel),
                       comm_, request);
    });
  }
  void receive(std::uint32_t from, Channel channel, std::span<std::byte> data, Ticket ticket) override {
    begin(ticket, data.size(), true, "MPI_Irecv", [&](MPI_Request* request) {
      return MPI_Irecv(data.data(), count_of(data.size()), MPI_BYTE, static_cast<int>(from), static_cast<int>(channel),
                       comm_, request);
    });
  }

  void all_gather(std::span<std::byte> data, std::span<const SlicePart> parts, Ticket ticket) override {
    next_lists_ = std::make_unique<Lists>();
    Lists& lists = *next_lists_;
    for (const SlicePart& part : parts) {
      lists.counts.push_back(count_of(part.bytes));
      lists.begins.push_back(count_of(part.begin));
    }
    begin(ticket, 0, false, "MPI_Iallgatherv", [&](MPI_Request* request) {
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data.data(), lists.counts.data(), lists.begins.data(),
                             MPI_BYTE, comm_, request);
    });
  }
  void broadcast(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override {
    begin(ticket, 0, false, "MPI_Ibcast", [&](MPI_Request* request) {
      return MPI_Ibcast(data.data(), count_of(data.size()), MPI_BYTE, static_cast<int>(root), comm_, request);
    });
  }
  void reduce(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override {
    begin(ticket, 0, false, "MPI_Ireduce", [&](MPI_Request* request) {
      const bool is_root = root == rank();
      return MPI_Ireduce(is_root ? MPI_IN_PLACE : data.data(), is_root ? data.data() : nullptr,
                         count_of(data.size() / sizeof(float)), MPI_FLOAT, MPI_SUM, static_cast<int>(root), comm_,
                         request);
    });
  }
  // In place MPI leaves the own sum at the beginning, from where it is moved when it is there.
  void reduce_scatter(std::span<std::byte> data, std::span<const std::uint64_t> slices, Ticket ticket) override {
    next_lists_ = std::make_unique<Lists>();
    Lists& lists = *next_lists_;
    std::uint64_t begin_bytes = 0;
    for (const std::uint64_t slice : slices) {
      lists.counts.push_back(count_of(slice / sizeof(float)));
      lists.begins.push_back(count_of(begin_bytes / sizeof(float)));
      begin_bytes += slice;
    }
    const auto self = static_cast<std::size_t>(rank_);
    lists.move_from = data.data();
    lists.move_to = data.data() + static_cast<std::size_t>(lists.begins[self]) * sizeof(float);
    lists.move_bytes = slices[self];
    begin(ticket, 0, false, "MPI_Ireduce_scatter", [&](MPI_Request* request) {
      return MPI_Ireduce_scatter(MPI_IN_PLACE, data.data(), lists.counts.data(), MPI_FLOAT, MPI_SUM, comm_, request);
    });
  }

  std::size_t poll(std::span<Ticket> over) override;
  std::string failure() const override { return failure_; }
  bool close(Parting parting) noexcept override;

 private:
  // Of a collective: MPI reads the arrays until it is over.
  struct Lists {
    Ticket ticket = 0;
    std::vector<int> counts, begins;
    std::byte *move_from = nullptr, *move_to = nullptr;
    std::size_t move_bytes = 0;
  };
  struct Begun {
    Ticket ticket = 0;
    std::size_t bytes = 0;  // that a receive is for
    bool is_receive = false;
    const char* call = "";
    std::unique_ptr<Lists> lists;
  };

  template <typename Call>
  void begin(Ticket ticket, std::size_t bytes, bool is_receive, const char* name, Call call) {
    const std::lock_guard lock(calls());
    MPI_Request request = MPI_REQUEST_NULL;
    const int error = call(&request);
    if (error != MPI_SUCCESS) return fail(name, error);
    requests_.push_back(request);
    begun_.push_back({ticket, bytes, is_receive, name, std::move(next_lists_)});
  }

  void test();
  void fail(const char* call, int error) {
    if (failure_.empty()) failure_ = std::string(call) + ": " + text_of(error);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1;
  std::string library_, failure_;
  std::unique_ptr<Lists> next_lists_;
  std::vector<MPI_Request> requests_;  // and of each:
  std::vector<Begun> begun_;
  std::vector<int> which_;
  std::vector<MPI_Status> statuses_;
  std::vector<Ticket> over_;  // and not given back yet
};

std::size_t MpiTransport::poll(std::span<Ticket> over) {
  if (over_.empty()) test();
  const std::size_t count = std::min(over.size(), over_.size());
  std::copy_n(over_.begin(), count, over.begin());
  over_.erase(over_.begin(), over_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

// All of them at once, which moves MPI on as well.
void MpiTransport::test() {
  const std::lock_guard lock(calls());
  which_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int done = 0;
  const int tested = MPI_Testsome(count_of(requests_.size()), requests_.data(), &done, which_.data(), statuses_.data());
  if (tested != MPI_SUCCESS && tested != MPI_ERR_IN_STATUS) {
    fail("MPI_Testsome", tested);
    return;
  }
  if (done == MPI_UNDEFINED) return;  // there are none
  for (int i = 0; i < done; ++i) {
    const auto place = static_cast<std::size_t>(which_[static_cast<std::size_t>(i)]);
    Begun& begun = begun_[place];
    const MPI_Status& status = statuses_[static_cast<std::size_t>(i)];
    int bytes = 0;
    if (tested == MPI_ERR_IN_STATUS && status.MPI_ERROR != MPI_SUCCESS) {
      fail(begun.call, status.MPI_ERROR);
      continue;
    }
    if (begun.is_receive) MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (begun.is_receive && static_cast<std::size_t>(bytes) != begun.bytes) {
      if (failure_.empty()) failure_ = "a message of another length than was agreed on";
      continue;
    }
    if (begun.lists && begun.lists->move_bytes > 0 && begun.lists->move_from != begun.lists->move_to) {
      std::memmove(begun.lists->move_to, begun.lists->move_from, begun.lists->move_bytes);
    }
    over_.push_back(begun.ticket);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    if (kept != i) begun_[kept] = std::move(begun_[i]);
    ++kept;
  }
  requests_.resize(kept);
  begun_.resize(kept);
}

// Where a connection is broken, or the other side ends while data is on its way, Open MPI 4.1 may crash in a call, or
// never come back from it.
bool MpiTransport::close(Parting parting) noexcept {
  const std::lock_guard lock(calls());
  --process().open;
  if (parting == Parting::kLost || !failure_.empty()) {
    process().lost = true;
    return requests_.empty();
  }
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (begun_[i].is_receive) MPI_Cancel(&requests_[i]);
  }
  int all = 0;
  for (int i = 0; i < 100 && !all; ++i) {
    if (MPI_Testall(count_of(requests_.size()), requests_.data(), &all, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
    if (!all) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // What others sent and nobody received would otherwise meet the next communicator that gets this one's number.
  if (parting == Parting::kTogether && all) MPI_Comm_free(&comm_);
  process().lost |= !all;
  return all;
}

std::unique_ptr<Transport> open(const MpiOptions& options) { return std::make_unique<MpiTransport>(options); }

}  // namespace
}  // namespace spillway::mpi

extern "C" [[gnu::visibility("default")]] const spillway::MpiPlugin* spillway_mpi_plugin() {
  static const spillway::MpiPlugin plugin{
      .interface = spillway::kMpiInterface, .version = SPILLWAY_VERSION, .open = spillway::mpi::open};
  return &plugin;
}
