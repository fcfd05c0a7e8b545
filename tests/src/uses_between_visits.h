// Uses of activations between the visits of the toy trainer.
#pragma once

#include <cstdint>
#include <vector>

#include "spillway/engine.h"

namespace spillway::testing {

// Makes a step's uses, part by part, and counts the bytes that are not what was written last.
class UsesBetweenVisits {
 public:
  UsesBetweenVisits(Engine& engine, const ModelDescription& model, std::uint32_t held, std::uint32_t parts)
      : engine_(engine), model_(model), held_(held), parts_(parts), version_(model.activations.size()) {
    leases_.reserve(held);
  }

  // A part of the step's uses, `held` of them at a time; all of them in `parts` calls.
  void run_part() {
    const auto& uses = model_.activation_uses;
    const std::size_t end = (part_ + 1) * uses.size() / parts_;
    for (std::size_t u = part_ * uses.size() / parts_; u < end; ++u) {
      if (leases_.size() == held_) leases_.erase(leases_.begin());
      leases_.push_back(engine_.acquire_activation(uses[u].activation, uses[u].access, engine_.stream()));
      enqueue(uses[u], leases_.back().data());
    }
    if (++part_ < parts_) return;
    part_ = 0;
    leases_.clear();
  }
  void drop() { leases_.clear(); }
  std::uint64_t wrong() {
    engine_.stream().synchronize();
    return wrong_;
  }

 private:
  void enqueue(const ActivationUse& use, std::byte* at) {
    const std::uint8_t before = version_[use.activation];
    if (use.access != Access::kRead) version_[use.activation] = static_cast<std::uint8_t>(before + 41);
    const std::uint8_t after = version_[use.activation];
    const std::uint64_t count = model_.activations[use.activation].bytes;
    engine_.stream().launch([at, count, use, before, after, wrong = &wrong_](HostWorkers&) {
      const auto byte = [](std::uint8_t version, std::uint64_t i) { return static_cast<std::byte>(version + i % 251); };
      if (use.access != Access::kWrite) {
        for (std::uint64_t i = 0; i < count; ++i) *wrong += at[i] != byte(before, i);
      }
      if (use.access != Access::kRead) {
        for (std::uint64_t i = 0; i < count; ++i) at[i] = byte(after, i);
      }
    });
  }

  Engine& engine_;
  const ModelDescription& model_;
  const std::size_t held_, parts_;
  std::vector<std::uint8_t> version_;
  std::vector<ActivationLease> leases_;
  std::size_t part_ = 0;
  std::uint64_t wrong_ = 0;
};

}  // namespace spillway::testing
