#include "faulty_engine.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

#include "spillway/error.h"

namespace spillway::testing {
namespace {

class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, FaultPlan plan)
      : inner_(std::move(inner)),
        plan_(std::move(plan)),
        random_(plan_.seed),
        trace_(plan_.trace ? *plan_.trace : own_trace_) {}

  std::size_t submit(std::span<const IoPiece> pieces) override {
    if (!pieces.empty() && chance(plan_.takes_fewer)) {
      ++trace_.fewer;
      pieces = pieces.first(random_() % pieces.size());
    }
    std::size_t taken = 0;
    for (; taken < pieces.size(); ++taken) {
      if (!submit_one(pieces[taken])) break;
    }
    trace_.in_flight += static_cast<std::uint32_t>(taken);
    trace_.most_in_flight = std::max(trace_.most_in_flight, trace_.in_flight);
    return taken;
  }

  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    // With results held back here there may be nothing to wait for below.
    const double bounded = timeout_seconds < 0 || timeout_seconds > 1e-3 ? 1e-3 : timeout_seconds;
    IoResult below[64];
    const Reaped inner = inner_->reap(below, held_.empty() ? timeout_seconds : bounded);
    for (const IoResult& result : std::span(below).first(inner.count)) {
      const Fault fault = faults_[result.slot];
      held_.push_back({{result.slot, fault.moved != -1 ? fault.moved : result.moved}, fault.hold});
    }
    if (plan_.reorder) std::shuffle(held_.begin(), held_.end(), random_);
    Reaped reaped{.woken = inner.woken};
    std::vector<Held> still;
    for (Held& held : held_) {
      if (trace_.hold_all || held.rounds > 0 || reaped.count == out.size()) {
        held.rounds -= held.rounds > 0;
        still.push_back(held);
      } else {
        out[reaped.count++] = held.result;
      }
    }
    held_ = std::move(still);
    trace_.in_flight -= static_cast<std::uint32_t>(reaped.count);
    return reaped;
  }

  void wake() noexcept override { inner_->wake(); }
  std::string describe() const override { return "faulty " + inner_->describe(); }

 private:
  struct Held {
    IoResult result;
    std::uint32_t rounds;
  };

  bool chance(double probability) { return std::uniform_real_distribution<double>()(random_) < probability; }

  bool submit_one(IoPiece piece) {
    const Fault fault = plan_.script ? plan_.script(piece) : Fault{};
    const IoPiece asked = piece;
    if (fault.error != 0) {
      held_.push_back({{piece.slot, -fault.error}, fault.hold});
    } else {
      if (fault.bytes != 0) piece.bytes = std::min(piece.bytes, fault.bytes);
      if (faults_.size() <= piece.slot) faults_.resize(piece.slot + 1);
      faults_[piece.slot] = fault;
      if (inner_->submit(std::span(&piece, 1)) == 0) return false;
    }
    trace_.started.push_back(asked);
    trace_.errors += fault.error != 0;
    trace_.shorts += fault.bytes != 0;
    trace_.delays += fault.hold != 0;
    return true;
  }

  std::unique_ptr<IoEngine> inner_;
  FaultPlan plan_;
  std::mt19937_64 random_;
  EngineTrace own_trace_;
  EngineTrace& trace_;
  std::vector<Fault> faults_;  // by slot
  std::vector<Held> held_;
};

}  // namespace

FaultScript seeded_faults(std::uint64_t seed, const FaultRates& rates, std::uint64_t unit) {
  return [random = std::mt19937_64(seed), rates, unit](const IoPiece& piece) mutable {
    const auto chance = [&](double probability) {
      return std::uniform_real_distribution<double>()(random) < probability;
    };
    Fault fault;
    if (chance(rates.delay)) fault.hold = 1 + static_cast<std::uint32_t>(random() % 8);
    if (piece.op == IoOp::kSync && !rates.syncs_too) return fault;
    if (chance(rates.eintr)) fault.error = EINTR;
    if (chance(rates.eagain)) fault.error = EAGAIN;
    if (chance(rates.eio)) fault.error = EIO;
    if (piece.op == IoOp::kWrite && chance(rates.enospc)) fault.error = ENOSPC;
    if (piece.bytes > unit && chance(rates.short_transfer)) {
      fault.bytes = unit * (1 + random() % ((piece.bytes - 1) / unit));
    }
    return fault;
  };
}

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner, FaultPlan plan) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(plan));
}

}  // namespace spillway::testing
