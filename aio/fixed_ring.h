// A first-in-first-out ring of a size fixed at creation. Not thread-safe; overfilling it is a programmer error.
#pragma once

#include <cstddef>
#include <vector>

#include "spillway/error.h"

namespace spillway {

template <class T>
class FixedRing {
 public:
  explicit FixedRing(std::size_t capacity) : items_(capacity) {}

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  std::size_t room() const noexcept { return items_.size() - size_; }

  void push(const T& item) {
    SPILLWAY_CHECK(size_ < items_.size(), "ring overflow");
    items_[(head_ + size_) % items_.size()] = item;
    ++size_;
  }
  T& front() {
    SPILLWAY_CHECK(size_ > 0, "ring underflow");
    return items_[head_];
  }
  T pop() {
    const T item = front();
    head_ = (head_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<T> items_;
  std::size_t head_ = 0, size_ = 0;
};

}  // namespace spillway
