// Sections "aio" and "activation_checkpointing".
#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr ConfigKey kAioKeys[] = {
    {"aio", kSection, "", "how the drive is driven"},
    K{"aio.block_size", kInteger, "1048576", "largest request, in bytes", at<&C::io_block_bytes>, 4096, 1 << 30}
        .multiples_of(4096)
        .of_each_rank(),
    K{"aio.queue_depth", kInteger, "32", "requests in flight on each path, 4096 on all of them", at<&C::io_depth>, 1,
      4096}
        .of_each_rank(),

    {"activation_checkpointing", kSection, "", "what is kept between forward and backward"},
    {"activation_checkpointing.cpu_checkpointing", kBool, "false", "block inputs wait for backward in host memory",
     kAsWritten},
};

}  // namespace

std::span<const ConfigKey> aio_keys() { return kAioKeys; }

}  // namespace spillway
