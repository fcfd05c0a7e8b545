// A program that trains the toy model on several ranks, threads of one process, each with a store of its own:
// tests/cli/ranks_store_test.py looks at what it leaves, and kills it.
//
//   ranks_program DIRECTORY RANKS STEPS new|resume|replace
// The stores are DIRECTORY/rank0 and so on. Prints the step that it begins with.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "spillway/error.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

int train(const char* directory, std::uint32_t ranks, std::uint64_t steps, OnExisting on_existing) {
  const RanksCase of{.layout = layout_case("nvme")};
  std::atomic<int> status = EXIT_SUCCESS;
  run_ranks(ranks, [&](Communicator& communicator) {
    try {
      RankRun run(of, &communicator, directory, on_existing);
      if (run.rank == 0) {
        std::printf("begins with step %llu\n", static_cast<unsigned long long>(run.engine->current_step()));
        std::fflush(stdout);
      }
      run.until(steps);
    } catch (const Error& error) {
      if (communicator.rank() == 0) std::fprintf(stderr, "%s\n", error.what());
      status = EXIT_FAILURE;
    }
  });
  return status;
}

}  // namespace
}  // namespace spillway::testing

int main(int argc, char** argv) {
  using spillway::OnExisting;
  if (argc != 5) return EXIT_FAILURE;
  const std::string_view how = argv[4];
  const OnExisting on_existing = how == "new"      ? OnExisting::kRefuse
                                 : how == "resume" ? OnExisting::kResume
                                                   : OnExisting::kReplace;
  return spillway::testing::train(argv[1], static_cast<std::uint32_t>(std::atoi(argv[2])),
                                  static_cast<std::uint64_t>(std::atoll(argv[3])), on_existing);
}
