#include "src/comm/host_share.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "kernels/process_limits.h"
#include "kernels/thread_binding.h"
#include "kernels/thread_shares.h"
#include "spillway/gpu_ranks.h"
#include "spillway/log.h"

namespace spillway {
namespace {

constexpr std::int32_t kHosts = -4;  // in the place of a block
constexpr std::uint64_t kNoKey = std::numeric_limits<std::uint64_t>::max();

std::string contents_of(const char* file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::uint64_t key_of(const std::string& text) { return granule_checksum(std::as_bytes(std::span(text))); }

}  // namespace

// Containers have names of their own, and the same memory and cores.
std::string host_id() {
  std::string boot = contents_of("/proc/sys/kernel/random/boot_id");
  if (!boot.empty()) return boot;
  char name[65] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// An all_reduce knows no lists. So the groups take turns, the one with the least key first, and each rank of a group
// shows itself by a bit of its own.
RankGroup ranks_with(Communicator& ranks, std::uint64_t key) {
  constexpr std::uint32_t kBits = 64, kAtATime = kBits * kMostScalars;
  key >>= 1;  // so that none is kNoKey
  RankGroup group{.count = 0, .index = 0};
  for (bool found = false;;) {
    std::uint64_t turn = found ? kNoKey : key;
    ranks.all_reduce_now({&turn, 1}, Fold::kMin, kHosts);
    if (turn == kNoKey) return group;
    const bool ours = turn == key;
    for (std::uint32_t base = 0; base < ranks.ranks(); base += kAtATime) {
      std::array<std::uint64_t, kMostScalars> there{};
      const std::uint32_t own = ranks.rank() - base;  // far too large for those of another turn
      if (ours && ranks.rank() >= base && own < kAtATime) there[own / kBits] = std::uint64_t{1} << own % kBits;
      ranks.all_reduce_now(there, Fold::kOr, kHosts);
      for (std::uint32_t word = 0; ours && word < there.size(); ++word) {
        const std::uint32_t first = base + word * kBits;
        group.count += static_cast<std::uint32_t>(std::popcount(there[word]));
        if (first >= ranks.rank()) continue;
        const std::uint32_t below = ranks.rank() - first;
        const std::uint64_t mask = below >= kBits ? ~std::uint64_t{0} : (std::uint64_t{1} << below) - 1;
        group.index += static_cast<std::uint32_t>(std::popcount(there[word] & mask));
      }
    }
    found = found || ours;
  }
}

RankGroup ranks_on_this_host(Communicator& ranks) { return ranks_with(ranks, key_of(host_id())); }

std::string gpu_of(const RankGroup& host, const char* visible) {
  if (visible == nullptr) return std::to_string(host.index);
  std::vector<std::string> gpus(1);
  for (const char* at = visible; *at != 0; ++at) *at == ',' ? gpus.emplace_back().clear() : gpus.back().push_back(*at);
  return gpus.size() < host.count ? visible : gpus[host.index];  // fewer: the launcher has divided them
}

void take_gpu(Communicator& ranks) {
  constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
  if (const RankGroup host = ranks_on_this_host(ranks); host.count > 1)
    ::setenv(kVisible, gpu_of(host, std::getenv(kVisible)).c_str(), 1);
}

HostShare share_host(Communicator& ranks) {
  const RankGroup host = ranks_on_this_host(ranks);
  std::string cpus = host_id() + contents_of("/proc/self/cgroup");
  for (const unsigned cpu : affinity_cpus()) cpus += fmt::format(" {}", cpu);
  const RankGroup alike = ranks_with(ranks, key_of(cpus));
  if (alike.count > 1) {
    const std::vector<unsigned> part = cpus_of_share(usable_nodes(), alike.index, alike.count, cpu_quota());
    if (!bind_this_thread(CpuMask(part))) {
      log(LogLevel::kWarning,
          fmt::format("cannot be bound to its part of the cores ({}): {} ranks each start threads for all of them",
                      std::generic_category().message(errno), alike.count));
    }
  }
  HostShare share{.ranks = host.count, .index = host.index};
  for (const CpuNode& node : usable_nodes()) share.cores += node.cores;
  return share;
}

}  // namespace spillway
