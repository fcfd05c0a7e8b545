// Leases on blocks and activations (spillway/engine.h): handles that give back what they hold, once, when they go. What
// is lent, and what giving back means, is the engine's: StepEngine::acquire() and release() in engine.cc.
#include <utility>

#include "spillway/engine.h"

namespace spillway {

Lease::Lease(Lease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), number_(other.number_), stream_(other.stream_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::exchange(other.engine_, nullptr);
    number_ = other.number_;
    stream_ = other.stream_;
  }
  return *this;
}

Lease::~Lease() { release(); }

const void* Lease::weight(std::uint32_t parameter) const {
  SPILLWAY_CHECK(engine_, "a released lease has no weights");
  return engine_->weight_address(number_, parameter);
}

void Lease::release() {
  if (Engine* engine = std::exchange(engine_, nullptr)) engine->release(number_, *stream_);
}

ActivationLease::ActivationLease(ActivationLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)),
      place_(other.place_),
      data_(other.data_),
      stream_(other.stream_) {}

ActivationLease& ActivationLease::operator=(ActivationLease&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::exchange(other.engine_, nullptr);
    place_ = other.place_;
    data_ = other.data_;
    stream_ = other.stream_;
  }
  return *this;
}

ActivationLease::~ActivationLease() { release(); }

std::byte* ActivationLease::data() const {
  SPILLWAY_CHECK(engine_, "a released activation has no address");
  return data_;
}

void ActivationLease::release() {
  if (Engine* engine = std::exchange(engine_, nullptr)) engine->release_activation(place_, *stream_);
}

}  // namespace spillway
