// Reads every extent that a manifest names, at the drive's speed, and compares it with its checksum: before a run goes
// on from an older record, and for `spillway store --verify`. It only reports; what to do about bad bytes is its
// caller's matter.
//
// It uses a queue of its own, so nobody else may have one over the files; at most 64 MiB of memory. Thread: any.
// Errors: kIo (the queue itself); bytes that do not match are reported to `bad`, and are no errors here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "spillway/error.h"
#include "spillway/io_queue.h"
#include "swap/extents.h"
#include "swap/manifest.h"
#include "swap/store_files.h"

namespace spillway {

struct BadBytes {
  std::uint32_t tile = 0;
  Part part = Part::kWeights;
  Extent extent;
  StoreFiles::FileOffset place;  // where it starts
  int error = 0;                 // errno of a read that failed; 0: the checksum differs
};

struct ExtentCheck {
  std::function<void(const BadBytes& bad)> bad;  // may throw
  std::function<void(std::uint64_t done_bytes, std::uint64_t bytes)> progress = {};
};

// Returns the bytes that were read.
std::uint64_t check_extents(StoreFiles& files, const StoreLayout& layout, const Manifest& manifest,
                            const ExtentCheck& check);

// `states of tile 3 …`, by `name_of`; by its number where that is null.
std::string name_of_part(std::uint32_t tile, Part part, const std::function<std::string(std::uint32_t)>& name_of);
// `PATH: states of tile 3 … at offset 65536 do not match their checksum; HINT`
Error mismatch_error(const std::string& what, const StoreFiles::FileOffset& place, Hint hint);
// The same, or `cannot be read`.
Error bad_bytes_error(const BadBytes& bad, const std::function<std::string(std::uint32_t)>& name_of, Hint hint);

}  // namespace spillway
