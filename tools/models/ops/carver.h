// Divides a region of memory into consecutive pieces. The same code measures a layout (over a null base) and lays it
// out, so the size asked for is the size used.
#pragma once

#include <cstddef>

#include "spillway/units.h"

namespace spillway::models {

// Hands out consecutive pieces of a region. Over a null base it only measures.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(std::size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up<std::size_t>(count * sizeof(T), 64);
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace spillway::models
