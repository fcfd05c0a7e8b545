// Times this machine: its links as an engine does, and one layer and the head of a model on its device.
#pragma once

#include <cstdint>

#include "spillway/config.h"
#include "tools/plan/rates.h"
#include "tools/plan/shapes.h"

namespace spillway::planning {

struct MeasureOptions {
  bool drives = false;   // those of the configuration's nvme_paths; some 2 GB are written to them in a second
  bool compute = false;  // a layer and the head, of GPT-2 in the model's sizes
  std::uint32_t sequence = 256;
};

// Takes two or three seconds, in which signals wait. Whatever it puts on the drives loses its name as soon as it is
// open. Throws spillway::Error when the paths cannot be used.
MeasuredRates measure(const Config& config, const ModelShape& shape, DeviceKind device, const MeasureOptions& options);

}  // namespace spillway::planning
