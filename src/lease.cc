#include <utility>

#include "spillway/engine.h"

namespace spillway {

Lease::Lease(Lease&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), slot_(other.slot_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    engine_ = std::exchange(other.engine_, nullptr);
    slot_ = other.slot_;
  }
  return *this;
}

Lease::~Lease() { release(); }

const void* Lease::weight(std::uint32_t parameter) const {
  SPILLWAY_CHECK(engine_, "a released lease has no weights");
  return engine_->weight_address(slot_, parameter);
}

void Lease::release() {
  if (Engine* engine = std::exchange(engine_, nullptr)) engine->release(slot_);
}

}  // namespace spillway
