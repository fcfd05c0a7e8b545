// What a stream was given of a caller's memory it is done with before that goes, also where the call throws.
#pragma once

#include <exception>

#include "spillway/device.h"

namespace spillway::models {

class StreamEnd {
 public:
  explicit StreamEnd(Stream& stream) : stream_(stream) {}
  StreamEnd(const StreamEnd&) = delete;
  StreamEnd& operator=(const StreamEnd&) = delete;
  ~StreamEnd() {
    if (std::uncaught_exceptions() == exceptions_) return;
    try {
      stream_.synchronize();
    } catch (...) {  // a device that has failed; the first error counts
    }
  }

 private:
  Stream& stream_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace spillway::models
