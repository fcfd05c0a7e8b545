// Leases are the engine room's; tests of the model link without it.
#include "tests/tools/models/fake_engine.h"

namespace spillway {

Lease::Lease(Lease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), number_(other.number_), stream_(other.stream_) {}
Lease& Lease::operator=(Lease&& other) noexcept {
  release();
  engine_ = std::exchange(other.engine_, nullptr);
  number_ = other.number_;
  stream_ = other.stream_;
  return *this;
}
Lease::~Lease() { release(); }
const void* Lease::weight(std::uint32_t parameter) const { return engine_->weight_address(number_, parameter); }
void Lease::release() {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->release(number_, *stream_);
}

ActivationLease::ActivationLease(ActivationLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      place_(other.place_),
      data_(other.data_),
      stream_(other.stream_) {}
ActivationLease::~ActivationLease() { release(); }
std::byte* ActivationLease::data() const { return data_; }
void ActivationLease::release() {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->release_activation(place_, *stream_);
}

}  // namespace spillway
