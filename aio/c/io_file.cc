// Files, memory and stripes of the API for C.
#include <algorithm>
#include <cmath>
#include <limits>
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

using namespace spillway;
using namespace spillway::c;

namespace spillway::c {

IoTables& io_tables() {
  static IoTables& all = *new IoTables;
  return all;
}

void* MemoryTable::add(IoMemory memory) {
  const std::lock_guard lock(mutex_);
  std::byte* const first = memory.bytes().data();
  held_.emplace(reinterpret_cast<std::uintptr_t>(first), Held{std::move(memory)});
  return first;
}

void MemoryTable::free(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(reinterpret_cast<std::uintptr_t>(memory));
  if (found == held_.end())
    refuse("memory", "was not allocated here, or was freed", "give spillway_io_memory_allocate()'s");
  if (found->second.regions > 0)
    throw Error(Code::kBusy, {"memory", "is a region of a queue", 0, "remove it there, or destroy the queue"});
  held_.erase(found);
}

void MemoryTable::note_region(std::span<const std::byte> region, bool there) {
  const auto begin = reinterpret_cast<std::uintptr_t>(region.data()), end = begin + region.size();
  const std::lock_guard lock(mutex_);
  for (auto next = held_.lower_bound(end); next != held_.begin();) {
    Held& held = (--next)->second;
    if (next->first + held.memory.bytes().size() <= begin) return;  // nor do those below it reach so far
    there ? ++held.regions : --held.regions;
  }
}

}  // namespace spillway::c

namespace {

constexpr std::uint64_t kFarthest = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t kLargestSpace = std::uint64_t{1} << 55;  // 32 PiB; its product with a share is a number

// With a file that no other thread closes or renames meanwhile.
template <typename Body>
spillway_status with_file(const spillway_io_file* handle, Body&& body) {
  return guarded([&] {
    const auto object = io_tables().files.find(handle);
    const std::shared_lock turn(object->calls);
    body(object->file);
  });
}

// And with one that nobody else uses.
void check_alone(const FileObject& object) {
  if (object.queues == 0) return;
  throw Error(Code::kBusy,
              {object.file.path().string(), "is in an I/O queue", 0, "remove it there, or destroy the queue"});
}

void check_length(const File& file, std::uint64_t bytes) {
  if (bytes > kFarthest) refuse(file.path().string(), "no file has " + std::to_string(bytes) + " bytes");
}

// What a blocking transfer must be.
void check_transfer(const File& file, std::uint64_t offset, const void* data, std::uint64_t bytes) {
  if (bytes > 0) given(data, "data");
  if (offset > kFarthest || bytes > kFarthest - offset) refuse(file.path().string(), "offset out of range");
  if ((offset | bytes) % file.alignment() != 0) {
    refuse(file.path().string(), "offset and length are no multiples of its alignment",
           "they must be of " + std::to_string(file.alignment()));
  }
  if (reinterpret_cast<std::uintptr_t>(data) % file.memory_alignment() != 0) {
    refuse(file.path().string(), "the address is no multiple of its memory_alignment",
           "it must be of " + std::to_string(file.memory_alignment()));
  }
}

const StripeMap& check_space(const StripeMap& map, std::uint64_t space_offset) {
  if (space_offset < map.header_bytes() || space_offset - map.header_bytes() > kLargestSpace)
    refuse("space_offset", "is " + std::to_string(space_offset), "the space begins after header_bytes");
  return map;
}

const StripeMap& check_file(const StripeMap& map, std::uint32_t file) {
  if (file >= map.files()) refuse("file", "there is no file " + std::to_string(file) + " in the stripe map");
  return map;
}

}  // namespace

spillway_status spillway_io_file_open(const char* path, const spillway_io_file_options* options,
                                      spillway_io_file** file) {
  return guarded([&] {
    given(path, "path");
    given(file, "file");
    const auto read = read_struct(options, "spillway_io_file_options");
    if (read.create != 0 && read.writable == 0) refuse(path, "is created, and not to be written", "set writable");
    File opened = File::open(path, {.writable = read.writable != 0,
                                    .create = read.create != 0,
                                    .follow_links = read.follow_links != 0,
                                    .direct = read.buffered == 0});
    *file = io_tables().files.add(made_of<FileObject>(std::move(opened)));
  });
}

spillway_status spillway_io_file_close(spillway_io_file* file) {
  return guarded([&] {
    if (file == nullptr) return;
    const auto object = io_tables().files.find(file);
    const std::unique_lock alone(object->calls, std::try_to_lock);
    if (!alone)
      throw Error(Code::kBusy, {object->file.path().string(), "another thread calls with it", 0, "wait for that"});
    check_alone(*object);
    io_tables().files.take(file);
  });
}

spillway_status spillway_io_file_describe(const spillway_io_file* file, spillway_io_file_info* facts) {
  return with_file(file, [&](const File& asked) {
    check_struct(given(facts, "facts"), "spillway_io_file_info");
    spillway_io_file_info said = {};
    said.size_bytes = asked.size_bytes();
    said.alignment = asked.alignment();
    said.memory_alignment = asked.memory_alignment();
    said.direct = asked.direct();
    said.sync_error = asked.sync_error();
    said.at_its_path = asked.at_its_path();
    write_struct(facts, said);
  });
}

spillway_status spillway_io_file_preallocate(spillway_io_file* file, uint64_t bytes) {
  return with_file(file, [&](File& called) {
    check_length(called, bytes);
    called.preallocate(bytes);
  });
}

spillway_status spillway_io_file_reserve(spillway_io_file* file, uint64_t bytes, int32_t* reserved) {
  return with_file(file, [&](File& called) {
    check_length(called, bytes);
    given(reserved, "reserved");
    *reserved = called.reserve(bytes);
  });
}

spillway_status spillway_io_file_lock(spillway_io_file* file, double patience_seconds) {
  return with_file(file, [&](File& called) {
    if (!(patience_seconds >= 0 && patience_seconds <= 1e9))
      refuse("patience_seconds", "is " + std::to_string(patience_seconds), "choose 0 to a billion");
    called.lock(patience_seconds);
  });
}

spillway_status spillway_io_file_lock_shared(spillway_io_file* file, int32_t* locked) {
  return with_file(file, [&](File& called) {
    given(locked, "locked");
    *locked = called.lock_shared();
  });
}

spillway_status spillway_io_file_rename(spillway_io_file* file, const char* path) {
  return guarded([&] {
    given(path, "path");
    const auto object = io_tables().files.find(file);
    const std::unique_lock alone(object->calls);
    check_alone(*object);
    object->file.rename_to(path);
  });
}

spillway_status spillway_io_file_read(const spillway_io_file* file, uint64_t offset, void* data, uint64_t bytes,
                                      uint64_t least_bytes) {
  return with_file(file, [&](const File& called) {
    check_transfer(called, offset, data, bytes);
    if (least_bytes > bytes) refuse("least_bytes", "is more than all bytes");
    called.read_at(offset, {static_cast<std::byte*>(data), bytes}, least_bytes == 0 ? bytes : least_bytes);
  });
}

spillway_status spillway_io_file_write(spillway_io_file* file, uint64_t offset, const void* data, uint64_t bytes) {
  return with_file(file, [&](File& called) {
    check_transfer(called, offset, data, bytes);
    called.write_at(offset, {static_cast<const std::byte*>(data), bytes});
  });
}

spillway_status spillway_io_file_sync(spillway_io_file* file) {
  return with_file(file, [](File& called) { called.sync(); });
}

spillway_status spillway_io_file_aligned_range(const spillway_io_file* file, uint64_t offset, uint64_t bytes,
                                               spillway_io_range* range) {
  return with_file(file, [&](const File& asked) {
    check_struct(given(range, "range"), "spillway_io_range");
    if (offset > kFarthest / 2 || bytes > kFarthest / 2) refuse(asked.path().string(), "offset out of range");
    const AlignedRange found = aligned_range(asked, offset, bytes);
    spillway_io_range said = {};
    said.offset = found.offset;
    said.bytes = found.bytes;
    said.skip = found.skip;
    said.least_bytes = found.least_bytes;
    write_struct(range, said);
  });
}

spillway_status spillway_io_memory_allocate(uint64_t bytes, uint64_t alignment, void** memory,
                                            spillway_io_memory_info* granted) {
  return guarded([&] {
    given(memory, "memory");
    check_struct(granted, "spillway_io_memory_info");
    constexpr std::uint64_t kPage = 4096;
    IoMemory made = IoMemory::allocate(bytes, alignment == 0 ? kPage : alignment);
    spillway_io_memory_info said = {};
    said.alignment = std::max(alignment, kPage);
    said.locked = made.locked();
    said.lock_error = made.lock_error();
    write_struct(granted, said);
    *memory = io_tables().memory.add(std::move(made));
  });
}

spillway_status spillway_io_memory_free(void* memory) {
  return guarded([&] {
    if (memory != nullptr) io_tables().memory.free(memory);
  });
}

spillway_status spillway_stripe_map_create(const uint32_t* shares, size_t files, uint64_t unit_bytes,
                                           uint64_t header_bytes, spillway_stripe_map** map) {
  return guarded([&] {
    given(map, "map");
    if (files > 0) given(shares, "shares");
    if (unit_bytes > kLargestSpace || header_bytes > kLargestSpace)
      refuse("stripes", "a unit or a header is too large");
    *map = io_tables().stripes.add(made_of<StripesObject>(StripeMap({shares, files}, unit_bytes, header_bytes)));
  });
}

spillway_status spillway_stripe_map_destroy(spillway_stripe_map* map) {
  return guarded([&] {
    if (map != nullptr) io_tables().stripes.take(map);
  });
}

uint32_t spillway_stripe_map_file_of(const spillway_stripe_map* map, uint64_t space_offset) {
  return answered(UINT32_MAX, [&] {
    const auto object = io_tables().stripes.find(map);
    return check_space(object->map, space_offset).file_of(space_offset);
  });
}

spillway_status spillway_stripe_map_next_on(const spillway_stripe_map* map, uint32_t file, uint64_t space_offset,
                                            spillway_stripe_run* run) {
  return guarded([&] {
    check_struct(given(run, "run"), "spillway_stripe_run");
    const auto object = io_tables().stripes.find(map);
    const auto place = check_space(check_file(object->map, file), space_offset).next_on(file, space_offset);
    spillway_stripe_run said = {};
    said.space_offset = place.space_offset;
    said.file_offset = place.file_offset;
    said.bytes = place.bytes;
    write_struct(run, said);
  });
}

uint64_t spillway_stripe_map_file_bytes(const spillway_stripe_map* map, uint32_t file, uint64_t space_bytes) {
  return answered(uint64_t{0}, [&] {
    const auto object = io_tables().stripes.find(map);
    if (space_bytes > kLargestSpace) refuse("space_bytes", "is " + std::to_string(space_bytes));
    return check_file(object->map, file).file_bytes(file, space_bytes);
  });
}

spillway_status spillway_stripe_shares(const double* rates, const uint64_t* room_bytes, size_t files,
                                       uint64_t space_bytes, uint32_t row_units, uint32_t* shares) {
  return guarded([&] {
    given(rates, "rates"), given(room_bytes, "room_bytes"), given(shares, "shares");
    if (files == 0 || files > kLargestDepth) refuse("files", "there are " + std::to_string(files));
    if (row_units == 0 || row_units > 255) refuse("row_units", "is " + std::to_string(row_units), "choose 1 to 255");
    if (space_bytes > kLargestSpace) refuse("space_bytes", "is " + std::to_string(space_bytes));
    const std::span<const double> all(rates, files);
    if (!std::ranges::all_of(all, [](double rate) { return std::isfinite(rate) && rate > 0; }))
      refuse("rates", "one is not above 0", "give each drive the rate that was measured");
    const auto found = stripe_shares(all, {room_bytes, files}, space_bytes, row_units);
    if (found.empty())
      throw Error(Code::kDoesNotFit, {"stripes", std::to_string(space_bytes) + " bytes have no room in the files", 0,
                                      "make room, or lower the size of the space"});
    std::ranges::copy(found, shares);
  });
}
