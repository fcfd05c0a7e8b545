// A libcuda.so.1 with one card, for machines without a driver. SPILLWAY_FAKE_CUDA_INIT: what cuInit answers.
#include <cstddef>
#include <cstdlib>
#include <cstring>

extern "C" {

int cuInit(unsigned) {
  const char* answer = std::getenv("SPILLWAY_FAKE_CUDA_INIT");
  return answer != nullptr ? std::atoi(answer) : 0;
}

int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}

int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(length));
  return 0;
}

int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = std::size_t{24} << 30;
  return 0;
}

// An answer of 8 to major and minor alike.
int cuDeviceGetAttribute(int* value, int, int) {
  *value = 8;
  return 0;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

}  // extern "C"
