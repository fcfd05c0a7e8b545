#include "src/engine/memory_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "kernels/devices.h"
#include "kernels/process_limits.h"
#include "spillway/error.h"

namespace spillway {

std::uint64_t check_memory(const Plan& plan, DeviceKind device, std::uint32_t ranks) {
  const std::uint64_t need =
      plan.ledger.total(Placement::kHost) + (device_of(device).on_cpu ? plan.ledger.total(Placement::kHbm) : 0);
  // A cgroup's limit kills a process while the machine has memory left, so both are asked.
  const std::uint64_t in_group = memory_left().value_or(UINT64_MAX);
  const std::uint64_t have = std::min(available_memory(), in_group);
  const auto refuse = [](const std::string& happened, const char* hint) {
    throw Error(Code::kDoesNotFit, {"memory", happened, ENOMEM, hint});
  };
  if ((need + kLeastOutside) * ranks > have) {
    const std::string times = ranks > 1 ? fmt::format(" for each of {} ranks on this machine", ranks) : "";
    refuse(fmt::format("the plan needs {} MiB and the program {} more{}, {} {} MiB", div_up(need, kMiB),
                       kLeastOutside / kMiB, times,
                       in_group == have ? "this process's cgroup leaves" : "free on this machine are", have / kMiB),
           "lower spillway.host_bytes and spillway.hbm_bytes, or offload to nvme");
  }
  // Addresses are a limit of their own: arenas take theirs whole, before a page of them is touched.
  const std::uint64_t space = address_space_left().value_or(UINT64_MAX);
  if (need + kOutsideArenas > space) {
    refuse(fmt::format("the plan needs {} MiB and the program up to {} MiB more, ulimit -v leaves {} MiB",
                       div_up(need, kMiB), kOutsideArenas / kMiB, space / kMiB),
           "raise ulimit -v, or lower spillway.host_bytes and spillway.hbm_bytes");
  }
  return std::min(have / ranks - need - kLeastOutside, space - need - kOutsideArenas);
}

}  // namespace spillway
