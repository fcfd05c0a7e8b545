// What libspillway_nccl.so exports.
#include <nccl.h>

#include <cstring>
#include <memory>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/version.h"
#include "src/comm/cuda/nccl_mover.h"

namespace spillway::cuda {
namespace {

NcclId make_id() {
  ncclUniqueId unique;
  const ncclResult_t result = ncclGetUniqueId(&unique);
  if (result != ncclSuccess) {
    throw Error(Code::kIo, {"communicator nccl", std::string("ncclGetUniqueId: ") + ncclGetErrorString(result), 0,
                            "NCCL_DEBUG=WARN says more"});
  }
  NcclId id;
  std::memcpy(id.data(), &unique, id.size());
  return id;
}

std::unique_ptr<StreamMover> prepare(const NcclOptions& options) { return std::make_unique<NcclMover>(options); }

void connect(StreamMover& prepared, const NcclId& id) { static_cast<NcclMover&>(prepared).connect(id); }

void set_log(internal::LogState& to) {
  if (&to != &internal::log_state())
    set_log_sink([&to](LogLevel level, std::string_view text) { to.log(level, text); });
}

}  // namespace
}  // namespace spillway::cuda

extern "C" [[gnu::visibility("default")]] const spillway::NcclPlugin* spillway_nccl_plugin() {
  using namespace spillway;
  static const NcclPlugin plugin{.interface = kNcclInterface,
                                 .version = SPILLWAY_VERSION,
                                 .make_id = cuda::make_id,
                                 .prepare = cuda::prepare,
                                 .connect = cuda::connect,
                                 .set_log = cuda::set_log};
  return &plugin;
}
