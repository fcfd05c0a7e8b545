// What handles of the API for C of files and queues stand for, and the memory that it gave out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <vector>

#include "aio/c/calls.h"
#include "spillway/c_io.h"
#include "spillway/io_file.h"
#include "spillway/io_memory.h"
#include "spillway/shared_io_queue.h"
#include "spillway/stripe_map.h"

namespace spillway::c {

struct FileObject {
  File file;
  mutable std::shared_mutex calls = {};    // alone: who closes or renames it
  std::atomic<std::uint32_t> queues = {};  // that have it
};

struct StripesObject {
  StripeMap map;
};

// Files and regions are noted here once the queue has them, so that none ends before.
struct QueueObject {
  ~QueueObject();

  std::mutex mutex;  // of what comes and goes
  std::vector<std::shared_ptr<FileObject>> files;
  std::vector<std::span<std::byte>> regions;
  std::unique_ptr<SharedIoQueue> queue;
};

class MemoryTable {
 public:
  void* add(IoMemory memory);
  void free(void* memory);
  // A queue has this, which may be memory of here, as a region, or has it no more.
  void note_region(std::span<const std::byte> region, bool there);

 private:
  struct Held {
    IoMemory memory;
    std::uint32_t regions = 0;
  };
  std::mutex mutex_;
  std::map<std::uintptr_t, Held> held_;
};

// As in src/c/c_handles.h; kinds are other ones than there.
struct IoTables {
  Handles<spillway_io_file, FileObject> files{33, "spillway_io_file"};
  Handles<spillway_io_queue, QueueObject> queues{34, "spillway_io_queue"};
  Handles<spillway_stripe_map, StripesObject> stripes{35, "spillway_stripe_map"};
  MemoryTable memory;
};
IoTables& io_tables();

}  // namespace spillway::c
