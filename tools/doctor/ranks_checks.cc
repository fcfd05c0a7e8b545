#include "tools/doctor/checks.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "spillway/communicator.h"
#include "spillway/units.h"

namespace spillway::doctor {
namespace {

constexpr std::uint64_t kRanksBytes = 64 * kMiB;  // of a block of a model of some size
constexpr int kRounds = 5;
constexpr std::size_t kHostName = 64;

class Ranks {
 public:
  Ranks()
      : comm_(make_communicator()),
        workers_(create_workers(1)),
        device_(create_host_device({.hbm_bytes = kRanksBytes}, *workers_)),
        stream_(device_->create_stream("ranks")),
        data_(reinterpret_cast<float*>(device_->hbm().data()), kRanksBytes / sizeof(float)),
        slices_(comm_->ranks(), kRanksBytes / comm_->ranks() / sizeof(float) * sizeof(float)) {
    slices_.back() += kRanksBytes - slices_[0] * slices_.size();
    std::ranges::fill(data_, 1.0f);
  }

  Communicator& comm() { return *comm_; }

  // `2 on node1 and 1 on node2`
  std::string hosts() {
    const std::vector<std::uint64_t> slices(comm_->ranks(), kHostName);
    std::vector<char> names(kHostName * comm_->ranks());
    ::gethostname(names.data() + kHostName * comm_->rank(), kHostName - 1);
    comm_->all_gather(std::as_writable_bytes(std::span(names)), slices, 0, *stream_);
    wait_idle();
    std::map<std::string, int> ranks_on;
    for (std::uint32_t rank = 0; rank < comm_->ranks(); ++rank) ++ranks_on[names.data() + kHostName * rank];
    std::string text;
    for (const auto& [host, count] : ranks_on) text += fmt::format("{}{} on {}", text.empty() ? "" : ", ", count, host);
    return text;
  }

  // What a rank gets from others, or gives to them, in GB/s.
  double gather_gbps() {
    return gbps([&] { comm_->all_gather(std::as_writable_bytes(data_), slices_, 1, *stream_); });
  }
  double scatter_gbps(Sums sums) {
    return gbps([&] { comm_->reduce_scatter(data_, slices_, sums, 2, *stream_); });
  }
  double all_reduce_seconds() {
    std::vector<double> values(kMostScalars);
    return seconds([&] { comm_->all_reduce(std::span(values), Fold::kMax, 3, *stream_); });
  }

 private:
  void wait_idle() {
    stream_->synchronize();
    comm_->throw_if_failed();
  }

  // Of the slowest rank, in the best round: from when all have come.
  template <typename Call>
  double seconds(Call call) {
    double best = std::numeric_limits<double>::infinity();
    for (int round = 0; round < kRounds; ++round) {
      comm_->barrier(4, *stream_);
      wait_idle();
      const auto begin = std::chrono::steady_clock::now();
      call();
      wait_idle();
      double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      comm_->all_reduce(std::span(&taken, 1), Fold::kMax, 4, *stream_);
      wait_idle();
      best = std::min(best, taken);
    }
    return best;
  }
  template <typename Call>
  double gbps(Call call) {
    const double ranks = comm_->ranks();
    return static_cast<double>(kRanksBytes) * (ranks - 1) / ranks / seconds(call) * 1e-9;
  }

  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<HostWorkers> workers_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::span<float> data_;
  std::vector<std::uint64_t> slices_;
};

}  // namespace

Findings check_ranks() {
  Ranks ranks;
  if (ranks.comm().ranks() == 1) {
    return {{"", "ranks", Status::kSkipped,
             "one: no launcher has started others; mpirun -n 2 spillway doctor --ranks looks at two", "", ""}};
  }
  const std::string hosts = ranks.hosts();
  const double gather = ranks.gather_gbps(), tree = ranks.scatter_gbps(Sums::kTree);
  const double fastest = ranks.scatter_gbps(Sums::kFastest), reduce = ranks.all_reduce_seconds();
  if (ranks.comm().rank() != 0) return {};
  const auto ok = [](const char* check, std::string seen) { return Finding{"", check, Status::kOk, seen, "", ""}; };
  return {
      ok("ranks", fmt::format("{}: {}", ranks.comm().describe(), hosts)),
      ok("all_gather", fmt::format("{:.2f} GB/s into each rank, {} MiB at a time", gather, kRanksBytes / kMiB)),
      ok("reduce_scatter",
         fmt::format("{:.2f} GB/s out of each rank in the fixed tree, {:.2f} the library's own way", tree, fastest)),
      ok("all_reduce", fmt::format("{:.0f} µs for {} values", reduce * 1e6, kMostScalars))};
}

}  // namespace spillway::doctor
