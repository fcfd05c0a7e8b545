// A shared queue over a given one.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "spillway/shared_io_queue.h"

namespace spillway {

// `make` is called in the thread that the queue gets, which owns what it makes. `options` and `files` are those that it
// makes it of.
std::unique_ptr<SharedIoQueue> make_shared_queue(const IoQueueOptions& options, std::span<File* const> files,
                                                 const std::function<std::unique_ptr<IoQueue>()>& make);

}  // namespace spillway
