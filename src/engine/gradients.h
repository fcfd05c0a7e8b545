// Gradients of one step on their way from the caller to where the update reads them.
//
//   push ─► fp32 accumulator (when a parameter is pushed more than once; in HBM, or there while it is added to)
//        ─► with several ranks: their sums are added up, and each has its own part of that from here on
//        ─► staging: rounded once to the weight type; zeros where no push brought a gradient
//        ─► squared norm and NaN/Inf flag ─► host memory (one copy down), or through it to the scratch area of NVMe
//
// GradientPushes counts what has come, GradientMemory says where it lies; this file does the work. Everything is
// enqueued on the caller's stream, the d2h stream, and the ranks' own; the host waits only in wait_landed(). Pushes of
// one block may come in any order and mix with those of one other block; with more blocks open at once, a block that
// lands in parts is normed on the CPU afterwards (same bits). One thread at a time. Errors: kInvalidArgument.
// Read next: gradient_pushes.h, swap/policy/gradient_memory.h, gradient_spills.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "spillway/engine.h"
#include "src/engine/gradient_pushes.h"
#include "src/engine/gradient_spills.h"
#include "src/plan/network_traffic.h"
#include "src/plan/plan.h"
#include "swap/accumulator_places.h"
#include "swap/policy/gradient_memory.h"
#include "swap/timeline.h"

namespace spillway {

// By what gradients are worked on and brought down.
struct GradientMovers {
  Device& device;
  HostWorkers& workers;
  std::span<std::byte> host;  // arena that host offsets refer to
  Stream& d2h;
  AccumulatorPlaces* accumulators = nullptr;  // null when none has its home in host memory
  Timeline* timeline = nullptr;
  // With several ranks: what they tell each other, and the stream on which that is done.
  Communicator* communicator = nullptr;
  Stream* net = nullptr;
};

class GradientCollector {
 public:
  // `spills`: null when nothing is spilled.
  GradientCollector(const Plan& plan, GradientMemoryOptions memory, GradientPushes& pushes,
                    const GradientMovers& movers, GradientSpills* spills = nullptr);

  void begin_step();
  // False while the block's gradient is to pass through memory that others still lie in: one of them must be forgotten
  // before push() may be called.
  bool has_room(std::uint32_t block) const { return memory_.has_room(block); }
  // A visit begins in which gradients of the block are to come.
  void expect(std::uint32_t block);
  // True when the block is complete with it: on its way down.
  bool push(const Gradient& gradient, Stream& stream);
  // With several ranks: adds up their sums of the block that was completed last. That waits for this call, so that what
  // the next visit gathers need not wait for sums. All ranks call it in the same place, at the latest before the next
  // push and before anybody waits for the block.
  void join();
  // A complete block: its gradient is where the update reads it, its norm known.
  bool landed(std::uint32_t block) const { return waiting_.block != block && device().done(*blocks_[block].landed); }
  // By parameter, of a block that has landed: whether a push on some rank brought a gradient.
  std::span<const std::uint8_t> brought(std::uint32_t block);
  void wait_landed(std::uint32_t block);
  bool finite(std::uint32_t block) const { return host_norm(block).first_nonfinite == kAllFinite; }  // once landed
  // A landed gradient has been used: the memory that it passed through may take another.
  void forget(std::uint32_t block) { memory_.updated(block); }

  // Blocks until nothing of what was pushed is under way.
  void wait_idle();
  // The same with every gradient of the step complete: they are where the update reads them.
  void wait_landed();

  // After wait_landed():
  double squared_norm_sum() const;
  std::optional<std::string> first_nonfinite() const;    // names parameter and block
  const std::byte* gradient(std::uint32_t block) const;  // host address, or HBM when gradients stay there
  // A piece of it, in the weights' type, which spilled() says nothing of, and others in its place. `first`: of the
  // elements that this rank has of the block's. In HBM they pass through the buffers of tiles, which must be free.
  void read(std::uint32_t block, std::uint64_t first, std::span<std::byte> to);
  void write(std::uint32_t block, std::uint64_t first, std::span<const std::byte> from);
  // After write(), on all ranks.
  void norm_again(std::uint32_t block);
  // Nothing: it is where gradient() says.
  std::optional<GradientSpills::Spilled> spilled(std::uint32_t tile) const {
    return spills_ ? spills_->spilled(tile) : std::nullopt;
  }

  // Sums that went to other ranks, and leaves that came.
  const Collectives& moved() const noexcept { return moved_; }
  std::uint64_t h2d_bytes() const noexcept { return movers_.accumulators ? movers_.accumulators->h2d_bytes() : 0; }
  std::uint64_t d2h_bytes() const noexcept {
    return d2h_bytes_ + (spills_ ? spills_->copied_bytes() : 0) +
           (movers_.accumulators ? movers_.accumulators->d2h_bytes() : 0);
  }

 private:
  struct BlockState {
    std::vector<std::uint8_t> in_staging;  // per parameter: rounded there, not yet on its way down
    bool unnormed = false;                 // it went down in parts: its norm is not known yet
    std::unique_ptr<Event> landed;         // recorded when the block is complete
    // With several ranks: who adds up which part of each section, and rounds it. Bytes of these, by section and rank:
    // of sums, of what they are rounded to, and of its leaves.
    std::vector<SectionShare> shares;
    std::vector<std::vector<std::uint64_t>> sum_bytes, rounded_bytes, leaf_bytes;
    std::vector<std::uint64_t> brought;  // bits
    bool joined = false;                 // which all ranks have
  };
  struct Staging {
    std::unique_ptr<Event> filled, free;
  };

  struct PartialSums;
  float* accumulator(std::uint32_t block, Stream& stream);  // once `stream` gets there
  PartialSums sums_of(std::uint32_t block, std::uint32_t parameter, Stream& stream);
  void add_up(const Gradient& gradient, Stream& stream);
  std::byte* staging_for(std::uint32_t block, Stream& stream);
  void round_into(std::byte* staging, std::uint32_t block, std::uint32_t parameter, const void* from, DType type,
                  Stream& stream);
  void fill_zeros(std::byte* staging, std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                  Stream& stream);
  void round_sums(std::uint32_t block, Stream& stream);
  void finish_sums(std::uint32_t block, Stream& stream);
  void join_sums(std::uint32_t block, float* sums);
  void norm(std::uint32_t block, const std::byte* rounded, Stream& stream);
  void sum_leaves(std::uint32_t block, const std::byte* rounded, double* leaves);
  void complete(std::uint32_t block, Stream& stream);
  void land(std::uint32_t block, Stream& stream);
  void send_down(const GradientDown& down, Stream& stream);
  void copy_down(std::uint32_t block, const std::byte* staging, std::uint64_t first, std::uint64_t bytes);
  std::byte* host_gradient(std::uint32_t block) const;
  NormResult& host_norm(std::uint32_t block) const;
  std::byte* hbm(const Region& region) const { return device().hbm().data() + region.offset; }
  Device& device() const { return movers_.device; }
  bool alone() const { return movers_.communicator == nullptr; }
  // Each rank has a part of a gradient, and no rank the whole.
  bool parted() const { return plan_.rank.count > 1; }

  const Plan& plan_;
  GradientPushes& pushes_;
  const GradientMovers movers_;
  GradientSpills* spills_;
  const DType type_;
  GradientMemory memory_;
  std::vector<BlockState> blocks_;
  std::vector<Staging> staging_;
  std::unique_ptr<Event> last_copy_, rounded_, summed_, scattered_;
  struct Waiting {
    std::optional<std::uint32_t> block;
    float* sums = nullptr;      // this rank's, in HBM
  } waiting_;                   // for join()
  std::vector<double> leaves_;  // for norms on the CPU
  std::uint64_t d2h_bytes_ = 0;
  Collectives moved_;
};

}  // namespace spillway
