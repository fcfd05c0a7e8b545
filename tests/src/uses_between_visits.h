// Uses of activations between the visits of the toy trainer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "spillway/engine.h"

namespace spillway::testing {

// Makes a step's uses, part by part, and counts the reads that do not see what was written last.
class UsesBetweenVisits {
 public:
  UsesBetweenVisits(Engine& engine, const ModelDescription& model, std::uint32_t held, std::uint32_t parts)
      : engine_(engine), model_(model), held_(held), parts_(parts), version_(model.activations.size()) {
    leases_.reserve(held);
    std::uint64_t largest = 0;
    for (const Activation& activation : model.activations) largest = std::max(largest, activation.bytes);
    for (std::uint64_t i = 0; i < largest + kVersions; ++i) content_.push_back(static_cast<std::byte>(i % kVersions));
  }

  ~UsesBetweenVisits() {  // what is enqueued looks at this object
    drop();
    engine_.stream().synchronize();
  }
  UsesBetweenVisits(const UsesBetweenVisits&) = delete;
  UsesBetweenVisits& operator=(const UsesBetweenVisits&) = delete;

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
  static constexpr std::uint32_t kVersions = 251;

  void enqueue(const ActivationUse& use, std::byte* at) {
    std::uint32_t& version = version_[use.activation];
    const std::byte* before = content_.data() + version;
    if (use.access != Access::kRead) version = (version + 41) % kVersions;
    const std::byte* after = content_.data() + version;
    const std::uint64_t count = model_.activations[use.activation].bytes;
    engine_.stream().launch([at, count, use, before, after, wrong = &wrong_](HostWorkers&) {
      if (use.access != Access::kWrite) *wrong += std::memcmp(at, before, count) != 0;
      if (use.access != Access::kRead) std::memcpy(at, after, count);
    });
  }

  Engine& engine_;
  const ModelDescription& model_;
  const std::size_t held_, parts_;
  std::vector<std::byte> content_;  // version v of an activation: these bytes from v on
  std::vector<std::uint32_t> version_;
  std::vector<ActivationLease> leases_;
  std::size_t part_ = 0;
  std::uint64_t wrong_ = 0;
};

}  // namespace spillway::testing
