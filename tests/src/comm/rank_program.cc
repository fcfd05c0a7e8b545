// A rank of a program that knows nothing of MPI: it asks for a communicator by name, and calls collectives until there
// is an error. mpi_test.py runs it under mpirun, stops and kills it.
//
//   rank_program DIRECTORY PATIENCE_SECONDS CALLS HOW [VALUES of each slice]
// In DIRECTORY it leaves, for each rank: rank<r>.pid; rank<r>.began once ten collectives are over; rank<r>.called after
// CALLS; rank<r>.end, the error or `well`. HOW, after CALLS: `well`: the end; `idle`: when there is DIRECTORY/go, one
// more; `leave`: then the end; of the last rank `exit`: without a word; `sleep`: for ever.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "spillway/communicator.h"
#include "spillway/error.h"

namespace spillway {
namespace {

struct Task {
  std::string directory, how;
  double patience_seconds = 0;
  int calls = 0;
  std::size_t values = 2'000;
};

// Written in one piece: whoever waits for it finds all of it.
void leave(const std::string& file, const std::string& text) {
  std::ofstream(file + ".new") << text;
  std::filesystem::rename(file + ".new", file);
}

void work(const Task& task, Communicator& communicator) {
  const auto workers = create_workers(1);
  const auto device = create_host_device({.hbm_bytes = 1 << 20}, *workers);
  const auto stream = device->create_stream("stream");
  const std::string file = task.directory + "/rank" + std::to_string(communicator.rank());
  leave(file + ".pid", std::to_string(::getpid()));
  std::vector<std::uint64_t> slices(communicator.ranks(), task.values * sizeof(float));
  std::vector<float> data(task.values * communicator.ranks());
  const bool is_last = communicator.rank() + 1 == communicator.ranks();
  for (int i = 0; i < task.calls; ++i) {
    communicator.reduce_scatter(data, slices, Sums::kTree, 4, *stream);
    communicator.all_gather(std::as_writable_bytes(std::span(data)), slices, 5, *stream);
    stream->synchronize();
    communicator.throw_if_failed();
    if (i == 10) leave(file + ".began", "");
  }
  leave(file + ".called", "");
  const bool waits = task.how == "idle" || task.how == "leave";
  while (waits && !std::filesystem::exists(task.directory + "/go")) ::usleep(10'000);
  if (is_last && task.how == "exit") ::_exit(0);
  while (is_last && task.how == "sleep") ::sleep(1);
  if (task.how == "well" || task.how == "leave") return;
  communicator.barrier(6, *stream);
  stream->synchronize();
  communicator.throw_if_failed();
}

int run(const Task& task) {
  const auto communicator = make_communicator("auto", {.patience_seconds = task.patience_seconds});
  std::string end = "well";
  try {
    work(task, *communicator);
  } catch (const Error& error) {
    end = error.what();
  }
  leave(task.directory + "/rank" + std::to_string(communicator->rank()) + ".end", end);
  return end == "well" ? 0 : 3;
}

}  // namespace
}  // namespace spillway

int main(int argc, char** argv) {
  try {
    spillway::Task task{
        .directory = argv[1], .how = argv[4], .patience_seconds = std::atof(argv[2]), .calls = std::atoi(argv[3])};
    if (argc > 5) task.values = static_cast<std::size_t>(std::atoll(argv[5]));
    return spillway::run(task);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 4;
  }
}
