#include "faulty_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <random>
#include <utility>

#include "spillway/error.h"
#include "temp_files.h"

namespace spillway::testing {
namespace {

using Clock = std::chrono::steady_clock;

// The least that any drive stores or loses as a whole.
constexpr std::uint64_t kSmallestSector = 512;

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
    while (taken < pieces.size() && submit_one(pieces[taken])) ++taken;
    return taken;
  }

  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    // With results held back here there may be nothing to wait for below.
    const double bounded = timeout_seconds < 0 ? kPollSeconds : std::min(timeout_seconds, kPollSeconds);
    IoResult below[64];
    const Reaped inner = inner_->reap(below, held_.empty() ? timeout_seconds : bounded);
    for (const IoResult& result : std::span(below).first(inner.count)) {
      if (result.moved > 0) note_moved(result.slot, static_cast<std::uint64_t>(result.moved));
      const Fault& fault = slots_[result.slot].fault;
      hold({result.slot, fault.moved != -1 ? fault.moved : result.moved});
    }
    if (plan_.reorder) std::shuffle(held_.begin(), held_.end(), random_);
    Reaped reaped{.woken = inner.woken};
    const auto now = Clock::now();
    std::erase_if(held_, [&](Held& held) {
      const IoPiece& piece = slots_[held.result.slot].asked;
      const bool gated = trace_.hold_all || (trace_.hold_if && trace_.hold_if(piece));
      if (gated || held.rounds > 0 || held.due > now || reaped.count == out.size()) {
        held.rounds -= held.rounds > 0;
        return false;
      }
      out[reaped.count++] = held.result;
      Load& load = trace_.loads[piece.file];
      --load.pieces;
      load.bytes -= piece.bytes;
      --trace_.in_flight;
      return true;
    });
    return reaped;
  }

  void wake() noexcept override { inner_->wake(); }
  std::string describe() const override { return "faulty " + inner_->describe(); }
  void set_file(std::uint32_t index, const File* file) override { inner_->set_file(index, file); }
  bool add_region(std::span<std::byte> region) override { return inner_->add_region(region); }
  void remove_region(std::span<std::byte> region) override { inner_->remove_region(region); }

 private:
  static constexpr double kPollSeconds = 2e-4;  // between two looks at what is held back, in seconds

  struct Held {
    IoResult result;
    std::uint32_t rounds;
    Clock::time_point due;
  };
  struct Slot {
    Fault fault;
    IoPiece asked;
    std::unique_ptr<Memory> copy;  // with a flipped bit, for as long as it is written
  };

  bool chance(double probability) { return std::uniform_real_distribution<double>()(random_) < probability; }

  void hold(const IoResult& result) {
    const Fault& fault = slots_[result.slot].fault;
    const std::chrono::duration<double> delay(fault.delay_seconds);
    held_.push_back({result, fault.hold, Clock::now() + std::chrono::duration_cast<Clock::duration>(delay)});
  }

  bool submit_one(const IoPiece& piece) {
    if (slots_.size() <= piece.slot) slots_.resize(piece.slot + 1);
    Slot& slot = slots_[piece.slot];
    slot.fault = plan_.script ? plan_.script(piece) : Fault{};
    slot.asked = piece;
    const Fault& fault = slot.fault;
    const bool torn = piece.op == IoOp::kWrite && fault.stored_sectors.has_value();
    if (torn) tear(piece, fault);
    if (torn || fault.error != 0) {
      hold({piece.slot, fault.error != 0 ? -fault.error : static_cast<std::int64_t>(piece.bytes)});
    } else {
      IoPiece below = piece;
      if (fault.bytes != 0) below.bytes = std::min(below.bytes, fault.bytes);
      if (piece.op == IoOp::kWrite && fault.flipped_bit) below.buffer = flipped_copy(slot, below.bytes);
      if (inner_->submit(std::span(&below, 1)) == 0) return false;
    }
    trace_.started.push_back(piece);
    trace_.errors += fault.error != 0;
    trace_.shorts += fault.bytes != 0;
    trace_.delays += fault.hold != 0 || fault.delay_seconds > 0;
    trace_.most_in_flight = std::max(trace_.most_in_flight, ++trace_.in_flight);
    Load& load = trace_.loads[piece.file];
    load.most_pieces = std::max(load.most_pieces, ++load.pieces);
    load.most_bytes = std::max(load.most_bytes, load.bytes += piece.bytes);
    return true;
  }

  static std::uint8_t mask_of(std::uint64_t bit) { return static_cast<std::uint8_t>(1u << bit % 8); }

  static std::byte* flipped_copy(Slot& slot, std::uint64_t bytes) {
    const std::uint64_t bit = *slot.fault.flipped_bit;
    slot.copy = std::make_unique<Memory>(bytes);
    std::copy_n(slot.asked.buffer, bytes, slot.copy->data());
    if (bit / 8 < bytes) slot.copy->data()[bit / 8] ^= std::byte{mask_of(bit)};
    return slot.copy->data();
  }

  // Bytes of a piece have arrived: what was wrong with them before is so no longer.
  void note_moved(std::uint32_t index, std::uint64_t moved) {
    Slot& slot = slots_[index];
    const IoPiece& piece = slot.asked;
    slot.copy.reset();
    if (piece.op == IoOp::kSync) return;
    forget(trace_.flipped, piece, moved);
    if (piece.op == IoOp::kWrite) forget(trace_.unstored, piece, moved);
    if (!slot.fault.flipped_bit || *slot.fault.flipped_bit / 8 >= moved) return;
    const std::uint64_t at = *slot.fault.flipped_bit / 8;
    const std::uint8_t mask = mask_of(*slot.fault.flipped_bit);
    if (piece.op == IoOp::kRead) piece.buffer[at] ^= std::byte{mask};
    trace_.flipped[{piece.file, piece.offset + at}] = mask;
    ++trace_.flips;
  }

  template <class Map>
  static void forget(Map& wrong, const IoPiece& piece, std::uint64_t bytes) {
    wrong.erase(wrong.lower_bound({piece.file, piece.offset}), wrong.lower_bound({piece.file, piece.offset + bytes}));
  }

  void tear(const IoPiece& piece, const Fault& fault) {
    const File& file = *plan_.files.at(piece.file);
    const std::uint64_t sector = std::max<std::uint64_t>(kSmallestSector, file.alignment());
    if (fault.error == 0) {
      forget(trace_.flipped, piece, piece.bytes);
      forget(trace_.unstored, piece, piece.bytes);
    }
    for (std::uint64_t at = 0, n = 0; at < piece.bytes; at += sector, ++n) {
      const std::uint64_t bytes = std::min(sector, piece.bytes - at);
      if ((*fault.stored_sectors >> n % 64 & 1) == 0) {
        if (fault.error == 0) trace_.unstored[{piece.file, piece.offset + at}] = bytes;
        continue;
      }
      const ssize_t stored = ::pwrite(file.fd(), piece.buffer + at, bytes, static_cast<off_t>(piece.offset + at));
      SPILLWAY_CHECK(stored == static_cast<ssize_t>(bytes), "the drive below the faults is well");
    }
    ++trace_.torn;
    trace_.lies += fault.error == 0;
  }

  std::unique_ptr<IoEngine> inner_;
  FaultPlan plan_;
  std::mt19937_64 random_;
  EngineTrace own_trace_;
  EngineTrace& trace_;
  std::vector<Slot> slots_;
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
    if (piece.op == IoOp::kSync || fault.error != 0) return fault;
    if (piece.bytes > unit && chance(rates.short_transfer)) {
      fault.bytes = unit * (1 + random() % ((piece.bytes - 1) / unit));
    } else if (chance(rates.flip)) {
      fault.flipped_bit = random() % (8 * piece.bytes);
    } else if (piece.op == IoOp::kWrite && chance(rates.torn)) {
      // A prefix, and of what follows whatever the drive got to.
      const std::uint64_t prefix = (std::uint64_t{1} << random() % 16) - 1;
      fault.stored_sectors = prefix | (random() & random());
      if (!chance(rates.lie)) fault.error = EIO;
    }
    return fault;
  };
}

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner, FaultPlan plan) {
  return std::make_unique<FaultyEngine>(std::move(inner), std::move(plan));
}

}  // namespace spillway::testing
