#include "src/engine/device_choice.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kernels/thread_shares.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/gpu_ranks.h"
#include "spillway/log.h"
#include "src/comm/agreement.h"
#include "src/comm/nccl_plugin.h"

namespace spillway {
namespace {

// What a rank asks for, as a number that ranks exchange.
constexpr std::uint64_t kAskedAuto = 0;
std::uint64_t asked_for(DeviceKind kind) { return 1 + static_cast<std::uint64_t>(kind); }

template <typename Value>
std::optional<std::uint32_t> first_with(const std::vector<std::uint64_t>& of_ranks, Value value) {
  const auto found = std::ranges::find(of_ranks, static_cast<std::uint64_t>(value));
  if (found == of_ranks.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - of_ranks.begin());
}

// Of ranks that may have GPUs and need none: why not; empty: they are joined.
std::string why_no_gpus(Agreement& ranks, Communicator& communicator, const ChosenDevice& here) {
  const std::vector<std::uint64_t> gpus = ranks.gather(!here.type->on_cpu);
  if (const auto without = first_with(gpus, false)) {
    if (!first_with(gpus, true)) return {};  // each as it would be alone
    return fmt::format("rank {} has no GPU ({})", *without, ranks.same(here.why_missing(), *without));
  }
  try {
    join_current_gpus(communicator);
  } catch (const Error& error) {  // the same on every rank
    communicator.throw_if_failed();
    if (error.code() != Code::kUnsupported && error.code() != Code::kInvalidArgument) throw;
    return error.what();
  }
  return {};
}

ChosenDevice require_device(const Config& config, std::span<const DeviceType> among) {
  ChosenDevice chosen = choose_device(config.device, among);
  if (chosen.here()) return chosen;
  throw Error(Code::kUnsupported,
              {"spillway.device", fmt::format("is {}, and there is none: {}", chosen.type->name, chosen.why_missing()),
               0, chosen.type->remedy() + "; \"host\" emulates a GPU in RAM"});
}

}  // namespace

std::string idle_gpu(const ChosenDevice& chosen) {
  if (!chosen.type->on_cpu) return {};
  const auto idle =
      std::ranges::find_if(chosen.missing, [](const MissingDevice& one) { return one.type->driver_seen(); });
  if (idle == chosen.missing.end()) return {};
  return "spillway.device is auto, and the CPU computes beside an idle GPU: " + idle->why + "; " + idle->type->remedy();
}

DeviceKind resolve_device(const Config& config) { return require_device(config, devices()).kind(); }

void agree_on_device(Config& config, Communicator& communicator) {
  Agreement ranks(&communicator);
  if (ranks.alone()) return;
  const std::vector<std::uint64_t> asked = ranks.gather(config.device ? asked_for(*config.device) : kAskedAuto);
  struct Named {
    const DeviceType* type;
    std::uint32_t rank;
  };
  std::vector<Named> named;
  for (const DeviceType& type : devices()) {
    if (const auto rank = first_with(asked, asked_for(type.kind))) named.push_back({&type, *rank});
  }
  // A run on two kinds of device would not have the same bits on all ranks.
  if (named.size() > 1) {
    const auto& [one, other] = std::pair(named.back(), named.front());
    throw Error(Code::kInvalidArgument, {"spillway.device",
                                         fmt::format("is {} on rank {}, and {} on rank {}", one.type->name, one.rank,
                                                     other.type->name, other.rank),
                                         0, "give all ranks the same"});
  }
  if (!named.empty() && !named[0].type->on_cpu) {
    config.device = named[0].type->kind;
    ranks.all([&] { resolve_device(config); });
    return join_current_gpus(communicator);
  }
  const ChosenDevice here = ranks.all([&] { return choose_device(config.device); });
  std::string why;
  if (named.empty()) {
    why = why_no_gpus(ranks, communicator, here);
  } else if (ranks.gather(!here.type->on_cpu) != std::vector<std::uint64_t>(ranks.rank().count)) {
    why = fmt::format("rank {} asks for the {}", named[0].rank, named[0].type->name);
  }
  if (!why.empty() || !named.empty()) config.device = DeviceKind::kHost;
  if (!why.empty() && ranks.rank().index == 0)
    log(LogLevel::kWarning, fmt::format("spillway.device is auto, and all ranks use the CPU: {}", why));
}

unsigned compute_threads(const Config& config) { return threads_of(share_threads(config.threads)); }

std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers,
                                      std::span<const DeviceType> among) {
  const ChosenDevice chosen = require_device(config, among);
  if (const std::string idle = idle_gpu(chosen); !idle.empty()) log(LogLevel::kWarning, idle);
  return chosen.type->create(hbm_bytes, workers);
}

}  // namespace spillway
