#include "tools/finetune/ranks.h"

#include "spillway/gpu_ranks.h"

namespace spillway::models::finetune {

void agree_on_device(Config& config, Ranks& ranks) {
  if (ranks.alone() || config.device == DeviceKind::kHost) return;
  take_gpu(ranks.communicator());
  spillway::agree_on_device(config, ranks.communicator());
}

}  // namespace spillway::models::finetune
