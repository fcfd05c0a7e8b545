// What a store holds, before there is one: its tiles, its slots, whose it is; and the space that this takes. Pure: the
// plan of a run says it, and TileStore makes or opens a store of that shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "spillway/remedy.h"
#include "swap/extents.h"
#include "swap/manifest.h"
#include "swap/rank.h"

namespace spillway {

struct StoreIdentity {
  std::string description;        // kept in the file; what the store is a store of
  std::uint64_t fingerprint = 0;  // of whatever must be equal for a store to fit a run
  Rank rank = {};                 // whose part of the model it has
  // What two descriptions differ in, first what their fingerprints cover; empty or null: not known here.
  // Throws kUnsupported when the stored one tells of what this version does not know.
  std::string (*difference)(const std::string& stored, const std::string& wanted) = nullptr;
  // What to do about that difference; null: use its settings, or replace the store.
  Remedy (*remedy)(const std::string& stored, const std::string& wanted) = nullptr;
  // The description as a store of that format has it; null: all have the same.
  std::string (*as_of_format)(const std::string& description, std::uint32_t format) = nullptr;
};

struct StoreShape {
  std::vector<TileShape> tiles;
  std::uint64_t parameters = 0;  // of the model: a commit may record a number of each
  std::uint32_t slots = 2;
  std::uint64_t scratch_bytes = 0;        // of a new store
  std::uint64_t least_scratch_bytes = 0;  // that a run cannot do without
  StoreIdentity identity;
  std::function<std::string(std::uint32_t tile)> name_of = {};  // for error messages; null: its number
};

RecordForm record_form(const StoreShape& shape);  // of a new store
StoreGeometry store_geometry(const StoreShape& shape, const RecordForm& form);
// Where the space of a store of this shape ends, and the disk space that it takes in so many paths.
std::uint64_t space_bytes(const StoreShape& shape);
std::uint64_t disk_bytes(const StoreShape& shape, std::size_t paths);
std::uint64_t disk_bytes(std::uint64_t total_bytes, std::size_t paths);  // with a space of so many

}  // namespace spillway
