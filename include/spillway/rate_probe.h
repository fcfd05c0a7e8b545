// How fast a drive moves bytes, for whoever must choose between several: the rates that stripe_shares() takes.
//
// Thread: any; it makes a queue of its own, and returns when all of it is done. Errors: kNotFound and kIo with the
// directory as object, kInvalidArgument for options that no queue takes.
#pragma once

#include "spillway/cplusplus.h"

#include <filesystem>

#include "spillway/io_queue.h"

namespace spillway {

// Bytes per second of reads and writes mixed, together, in a file of its own in `directory` (64 MiB, less where that is
// not free; without a name, so that nothing is left behind), which is written once and then read and written by halves:
// 160 MiB written, 96 read, in a fraction of a second on any SSD. Uses engine, block_bytes and depth of `options`.
double probe_rate(const std::filesystem::path& directory, const IoQueueOptions& options);

}  // namespace spillway
