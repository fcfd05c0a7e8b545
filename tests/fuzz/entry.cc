// libFuzzer's entry to one target, which the build names.
#include <cstdint>

#include "spillway/log.h"
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  spillway::set_log_sink({});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spillway::fuzz::SPILLWAY_FUZZ_TARGET(std::as_bytes(std::span(data, size)));
  return 0;
}
