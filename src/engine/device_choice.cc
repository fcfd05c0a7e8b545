#include "src/engine/device_choice.h"

#include <filesystem>
#include <utility>

#include "kernels/thread_shares.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {

ChosenDevice choose_device(const Config& config) {
  if (config.device == DeviceKind::kHost) return {};
  std::string why = cuda_unavailable();
  return {config.device || why.empty() ? DeviceKind::kCuda : DeviceKind::kHost, std::move(why)};
}

std::string idle_gpu(bool seen, const std::string& no_cuda, const std::string& remedy) {
  if (!seen) return {};
  return "spillway.device is auto, and the CPU computes beside an idle GPU: " + no_cuda + "; " +
         (remedy.empty() ? "`spillway doctor` looks closer" : remedy);
}

DeviceKind resolve_device(const Config& config) {
  const ChosenDevice chosen = choose_device(config);
  if (chosen.here()) return chosen.kind;
  const std::string remedy = cuda_plugin_remedy();
  throw Error(Code::kUnsupported,
              {"spillway.device", "is cuda, and there is none: " + chosen.no_cuda, 0,
               (remedy.empty() ? "`spillway doctor` looks closer" : remedy) + "; \"host\" emulates a GPU in RAM"});
}

unsigned compute_threads(const Config& config) { return threads_of(share_threads(config.threads)); }

std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers) {
  if (resolve_device(config) == DeviceKind::kCuda) return create_cuda_device({.hbm_bytes = hbm_bytes});
  if (!config.device) {
    const bool seen = std::filesystem::exists("/dev/nvidiactl") || std::filesystem::exists("/dev/dxg");
    if (const std::string idle = idle_gpu(seen, cuda_unavailable(), cuda_plugin_remedy()); !idle.empty()) {
      log(LogLevel::kWarning, idle);
    }
  }
  return create_host_device({.hbm_bytes = hbm_bytes}, workers);
}

}  // namespace spillway
