// Times this machine: its links as an engine does, and one layer and the head of a model on its device.
#pragma once

#include <cstdint>

#include "spillway/config.h"
#include "tools/models/shape.h"
#include "tools/plan/rates.h"

namespace spillway::planning {

struct MeasureOptions {
  bool drives = false;       // those of the configuration's nvme_paths; 400 MB are taken on them for each second
  double drive_seconds = 1;  // longer shows what a drive does once its fast cache is full
  bool compute = false;      // a layer and the head, of GPT-2 in the model's sizes
  std::uint32_t sequence = 256;
};

// Takes two or three seconds besides; signals wait until what it puts on the drives has lost its name, as soon as it is
// open, and while compute is timed. Throws spillway::Error when the paths cannot be used.
MeasuredRates measure(const Config& config, const ModelShape& shape, DeviceKind device, const MeasureOptions& options);

}  // namespace spillway::planning
