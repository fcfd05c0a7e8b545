// The update of states that live in HBM: by the device, every tile in one go. It is the counterpart of TileExecutor for
// a plan in which nothing moves; it reads no drive and writes none. One thread at a time. Errors: kNonFinite (a result
// overflowed).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device.h"
#include "src/engine/gradients.h"
#include "src/engine/parameter_updates.h"
#include "src/plan/plan.h"
#include "swap/stall_meter.h"

namespace spillway {

class DeviceUpdate {
 public:
  // `host`: the arena, in which the plan leaves a page after the norms of gradients.
  DeviceUpdate(const Plan& plan, const ModelDescription& model, Device& device, const GradientCollector& gradients,
               std::span<std::byte> host, Stream& stream, Watch watch = {});

  // Blocks until it is made.
  void run(const ParameterUpdates& parameters);

  bool overflowed() const noexcept { return overflowed_; }
  double seconds() const noexcept { return seconds_; }                  // all runs together
  double element_seconds() const noexcept { return element_seconds_; }  // of the latest one; 0 before the first

 private:
  void update(std::uint32_t tile, const ParameterUpdates& parameters);
  bool finite();

  const Plan& plan_;
  Device& device_;
  const GradientCollector& gradients_;
  Stream& stream_;
  const Watch watch_;
  std::uint32_t* finite_ = nullptr;   // in HBM; none while the plan keeps nothing there
  std::uint32_t* fetched_ = nullptr;  // where it comes down
  std::vector<GroupRange> ranges_;
  bool overflowed_ = false;
  double seconds_ = 0, element_seconds_ = 0;
};

}  // namespace spillway
