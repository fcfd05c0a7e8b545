// Which GPU a call of CUDA's is for; private to plugins.
//
// CUDA has a context in each thread, and a thread that never chose has the first GPU's, made when it is first needed:
// there a kernel on a stream of another GPU is refused, and what else a call does costs that GPU some hundred MiB. So
// what belongs to a GPU keeps the context that it was made in, and puts it in the place of a thread's own around its
// calls. The context of a thread that has chosen, PyTorch's say, is mostly the same, and stays.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "kernels/cuda/check.h"
#include "spillway/error.h"

namespace spillway::cuda {

// A function of the driver's: plugins are linked with the runtime alone.
template <typename Function>
Function driver_function(const char* name) {
  constexpr unsigned kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found), "asking the driver");
  if (function != nullptr && found == cudaDriverEntryPointSuccess) return reinterpret_cast<Function>(function);
  throw Error(Code::kUnsupported,
              {"GPU", std::string("the driver has no ") + name, 0, "install a newer NVIDIA driver"});
}

// The driver's numbers of errors are the runtime's.
inline void check_driver(CUresult result, const char* what) { check(static_cast<cudaError_t>(result), what); }

class Context {
 public:
  // Of this thread's GPU, and made where it has none yet.
  static Context of_this_thread() {
    Context context;
    context.query();
    if (context.handle_ != nullptr) return context;
    check(cudaFree(nullptr), "beginning with the GPU");
    context.query();
    return context;
  }
  // The number of this thread's GPU; none is begun with. A program may have a runtime of CUDA's of its own beside this
  // one, PyTorch's say: what that has chosen the driver knows.
  static int gpu_of_this_thread() {
    Context context;
    context.query();
    int number = 0;
    if (context.handle_ == nullptr) {
      check(cudaGetDevice(&number), "asking for the device");
    } else {
      check_driver(driver().device(&number), "asking for the device");
    }
    return number;
  }

  // While it lives, this thread's calls are for the context's GPU.
  class Use {
   public:
    explicit Use(const Context& context) noexcept {
      CUcontext own = nullptr;
      if (driver().current(&own) == CUDA_SUCCESS && own == context.handle_) return;
      pushed_ = driver().push(context.handle_) == CUDA_SUCCESS;  // else what follows says why
    }
    ~Use() {
      CUcontext ours = nullptr;
      if (pushed_) static_cast<void>(driver().pop(&ours));
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    bool pushed_ = false;
  };

 private:
  void query() { check_driver(driver().current(&handle_), "asking for the context"); }

  struct Driver {
    decltype(&cuCtxGetCurrent) current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
    decltype(&cuCtxGetDevice) device = driver_function<decltype(&cuCtxGetDevice)>("cuCtxGetDevice");
    decltype(&cuCtxPushCurrent) push = driver_function<decltype(&cuCtxPushCurrent)>("cuCtxPushCurrent");
    decltype(&cuCtxPopCurrent) pop = driver_function<decltype(&cuCtxPopCurrent)>("cuCtxPopCurrent");
  };
  static const Driver& driver() {  // first by who makes a context, whom it may throw at
    static const Driver functions;
    return functions;
  }

  CUcontext handle_ = nullptr;
};

}  // namespace spillway::cuda
