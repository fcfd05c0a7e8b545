// Queues of the API for C.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "aio/c/calls.h"
#include "aio/c/io_tables.h"
#include "spillway/c_io.h"
#include "spillway/error.h"
#include "spillway/io_queue.h"
#include "spillway/rate_probe.h"
#include "spillway/shared_io_queue.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_IO_THREADS == static_cast<int>(kLastIoEngine));
static_assert(SPILLWAY_IO_SYNC == static_cast<int>(IoOp::kSync));
static_assert(SPILLWAY_IO_NORMAL == static_cast<int>(IoPriority::kNormal));
static_assert(SPILLWAY_IO_STRIPED == kStripedSpace);
static_assert(sizeof(spillway_io_completion) == sizeof(IoCompletion) &&
              offsetof(spillway_io_completion, error) == offsetof(IoCompletion, error) &&
              offsetof(spillway_io_completion, error_file) == offsetof(IoCompletion, error_file) &&
              offsetof(spillway_io_completion, error_offset) == offsetof(IoCompletion, error_offset) &&
              offsetof(spillway_io_completion, error_bytes) == offsetof(IoCompletion, error_bytes));

namespace spillway::c {

QueueObject::~QueueObject() {
  queue.reset();
  for (const auto& file : files) {
    if (file) --file->queues;
  }
  for (const std::span<std::byte> region : regions) io_tables().memory.note_region(region, false);
}

}  // namespace spillway::c

namespace {

constexpr std::uint32_t kUsualPlaces = 16;  // of files, and of regions
constexpr std::uint32_t kMostRequests = 1 << 20;

template <typename Body>
spillway_status with_queue(const spillway_io_queue* handle, Body&& body) {
  return guarded([&] {
    const auto object = io_tables().queues.find(handle);
    body(*object->queue, *object);
  });
}

std::uint32_t or_usual(std::uint32_t value, std::uint32_t usual) { return value == 0 ? usual : value; }

IoQueueOptions queue_options(const spillway_io_queue_options& read) {
  IoQueueOptions options;
  options.engine = checked(read.engine, kLastIoEngine, "spillway_io_engine");
  options.depth = or_usual(read.depth, options.depth);
  if (read.block_bytes != 0) options.block_bytes = read.block_bytes;
  options.max_requests = or_usual(read.max_requests, options.max_requests);
  options.max_files = or_usual(read.max_files, std::max(kUsualPlaces, read.file_count));
  options.max_regions = or_usual(read.max_regions, kUsualPlaces);
  if (read.stall_report_seconds != 0) options.stall_report_seconds = read.stall_report_seconds;
  if (options.max_requests > kMostRequests)
    refuse("max_requests", "is " + std::to_string(options.max_requests), "choose 1 to 1048576");
  if (!(options.stall_report_seconds > 0 && options.stall_report_seconds <= 1e9))
    refuse("stall_report_seconds", "is " + std::to_string(options.stall_report_seconds), "choose 0 to a billion");
  return options;
}

void check_stripes(const StripeMap& map, std::span<File* const> files) {
  if (map.files() != files.size()) {
    refuse("stripes",
           "has shares of " + std::to_string(map.files()) + " files, and the queue " + std::to_string(files.size()),
           "give one file for each");
  }
  for (const File* file : files) {
    if ((map.unit_bytes() | map.header_bytes()) % file->alignment() != 0) {
      refuse("stripes", "its unit or header is no multiple of the alignment of " + file->path().string(),
             "choose one of " + std::to_string(file->alignment()));
    }
  }
}

IoRequest request_of(const spillway_io_request& given_request) {
  if (given_request.unused != 0) refuse("spillway_io_request", "`unused` is not 0", "fill it with zeros first");
  return {.op = checked(given_request.op, IoOp::kSync, "spillway_io_op"),
          .priority = checked(given_request.priority, IoPriority::kNormal, "spillway_io_priority"),
          .file = given_request.file,
          .offset = given_request.offset,
          .buffer = static_cast<std::byte*>(given_request.buffer),
          .bytes = given_request.bytes,
          .tag = given_request.tag,
          .least_bytes = given_request.least_bytes};
}

// A file's turn is held while it enters a queue, so that it is not closed in between.
std::shared_lock<std::shared_mutex> entering(const FileObject& file) { return std::shared_lock(file.calls); }

}  // namespace

spillway_status spillway_io_queue_create(const spillway_io_queue_options* options, spillway_io_queue** queue) {
  return guarded([&] {
    given(queue, "queue");
    const auto read = read_struct(options, "spillway_io_queue_options");
    IoQueueOptions wanted = queue_options(read);
    if (read.file_count > 0) given(read.files, "files");
    const auto made = std::make_shared<QueueObject>();
    std::vector<std::shared_lock<std::shared_mutex>> turns;
    std::vector<std::shared_ptr<FileObject>> objects;
    std::vector<File*> files;
    for (std::uint32_t i = 0; i < read.file_count; ++i) {
      objects.push_back(io_tables().files.find(read.files[i]));
      files.push_back(&objects.back()->file);
      // Given twice, it has its turn once.
      const auto same = std::ranges::find(objects, objects.back());
      if (same == objects.end() - 1) turns.push_back(entering(*objects.back()));
    }
    std::shared_ptr<StripesObject> stripes;
    if (read.stripes != nullptr) {
      stripes = io_tables().stripes.find(read.stripes);
      check_stripes(stripes->map, files);
      wanted.stripes = &stripes->map;
    }
    made->queue = SharedIoQueue::create(wanted, files, {});
    for (const auto& object : objects) ++object->queues;
    made->files = std::move(objects);
    *queue = io_tables().queues.add(made);
  });
}

spillway_status spillway_io_queue_close(spillway_io_queue* queue) {
  return with_queue(queue, [](SharedIoQueue& called, QueueObject&) { called.close(); });
}

// Who waits comes back once it is closed; a call that is under way holds the object.
spillway_status spillway_io_queue_destroy(spillway_io_queue* queue) {
  return guarded([&] {
    if (queue == nullptr) return;
    io_tables().queues.find(queue)->queue->close();
    io_tables().queues.take(queue);
  });
}

spillway_status spillway_io_queue_add_file(spillway_io_queue* queue, spillway_io_file* file, uint32_t* index) {
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject& object) {
    given(index, "index");
    const auto added = io_tables().files.find(file);
    const auto turn = entering(*added);
    const std::lock_guard lock(object.mutex);
    object.files.reserve(object.files.size() + 1);
    const std::uint32_t place = called.add_file(added->file);
    if (place >= object.files.size()) object.files.resize(place + 1);
    object.files[place] = added;
    ++added->queues;
    *index = place;
  });
}

spillway_status spillway_io_queue_remove_file(spillway_io_queue* queue, uint32_t index) {
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject& object) {
    const std::lock_guard lock(object.mutex);
    called.remove_file(index);
    --std::exchange(object.files.at(index), nullptr)->queues;
  });
}

spillway_status spillway_io_queue_add_region(spillway_io_queue* queue, void* data, uint64_t bytes,
                                             int32_t* registered) {
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject& object) {
    const auto begin = reinterpret_cast<std::uintptr_t>(given(data, "data"));
    if (bytes > UINTPTR_MAX - begin) refuse("region", "is longer than memory");
    const std::span<std::byte> region(static_cast<std::byte*>(data), bytes);
    const std::lock_guard lock(object.mutex);
    object.regions.reserve(object.regions.size() + 1);
    io_tables().memory.note_region(region, true);  // first: nobody frees it meanwhile
    try {
      const bool has = called.add_region(region);
      object.regions.push_back(region);
      if (registered != nullptr) *registered = has;
    } catch (...) {
      io_tables().memory.note_region(region, false);
      throw;
    }
  });
}

spillway_status spillway_io_queue_remove_region(spillway_io_queue* queue, void* data) {
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject& object) {
    const auto* begin = static_cast<const std::byte*>(given(data, "data"));
    const std::lock_guard lock(object.mutex);
    called.remove_region(begin);
    const auto region = std::ranges::find_if(object.regions, [&](const auto& each) { return each.data() == begin; });
    io_tables().memory.note_region(*region, false);
    object.regions.erase(region);
  });
}

spillway_status spillway_io_queue_submit(spillway_io_queue* queue, const spillway_io_request* requests, size_t count,
                                         size_t* taken) {
  if (taken != nullptr) *taken = 0;
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject&) {
    if (count > 0) given(requests, "requests");
    for (size_t i = 0; i < count; ++i) {
      called.submit(request_of(requests[i]));
      if (taken != nullptr) ++*taken;
    }
  });
}

spillway_status spillway_io_queue_wait(spillway_io_queue* queue, spillway_io_completion* completions, size_t capacity,
                                       double timeout_seconds, size_t* count) {
  return with_queue(queue, [&](SharedIoQueue& called, QueueObject&) {
    given(completions, "completions"), given(count, "count");
    *count = 0;
    if (std::isnan(timeout_seconds)) refuse("timeout_seconds", "is not a number");
    *count = called.wait({reinterpret_cast<IoCompletion*>(completions), capacity}, timeout_seconds).size();
  });
}

spillway_status spillway_io_queue_wake(spillway_io_queue* queue) {
  return with_queue(queue, [](SharedIoQueue& called, QueueObject&) {
    static_cast<void>(called.describe());  // refuses a process that the queue is not of
    called.wake();
  });
}

spillway_status spillway_io_queue_check(const spillway_io_queue* queue, spillway_io_op op,
                                        const spillway_io_completion* completion) {
  return with_queue(queue, [&](SharedIoQueue&, QueueObject& object) {
    const IoOp of = checked(op, IoOp::kSync, "spillway_io_op");
    if (given(completion, "completion")->error == 0) return;
    const IoCompletion said{.tag = completion->tag,
                            .error = completion->error,
                            .error_file = completion->error_file,
                            .error_offset = completion->error_offset,
                            .error_bytes = completion->error_bytes};
    const std::lock_guard lock(object.mutex);
    const bool there = said.error_file < object.files.size() && object.files[said.error_file] != nullptr;
    const std::string path =
        there ? object.files[said.error_file]->file.path().string() : "file " + std::to_string(said.error_file);
    throw Error(Code::kIo, {path, describe_transfer(of, said) + " failed", said.error,
                            said.error == ECANCELED ? "the queue was closed before" : "check the drive"});
  });
}

spillway_status spillway_io_queue_stats(const spillway_io_queue* queue, spillway_io_stats* stats) {
  return with_queue(queue, [&](SharedIoQueue& asked, QueueObject&) {
    check_struct(given(stats, "stats"), "spillway_io_stats");
    static_cast<void>(asked.describe());  // as in wake
    const IoStats found = asked.stats();
    spillway_io_stats said = {};
    said.read_bytes = found.read_bytes;
    said.write_bytes = found.write_bytes;
    said.syncs = found.syncs;
    said.busy_seconds = found.busy_seconds;
    said.pending = asked.pending();
    write_struct(stats, said);
  });
}

spillway_status spillway_io_queue_describe(const spillway_io_queue* queue, void (*line)(void*, const char*),
                                           void* user) {
  return with_queue(queue, [&](SharedIoQueue& asked, QueueObject&) {
    given(line, "line");
    line(user, asked.describe().c_str());
  });
}

spillway_status spillway_io_probe_rate(const char* directory, const spillway_io_queue_options* options,
                                       double* bytes_per_second) {
  return guarded([&] {
    given(directory, "directory"), given(bytes_per_second, "bytes_per_second");
    *bytes_per_second = probe_rate(directory, queue_options(read_struct(options, "spillway_io_queue_options")));
  });
}
