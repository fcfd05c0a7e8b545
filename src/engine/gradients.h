// Gradients of one step on their way from the caller to where the update reads them.
//
//   push ─► fp32 accumulator (when a parameter is pushed more than once; in HBM, or there while it is added to)
//        ─► staging: rounded once to the weight type; zeros where no push brought a gradient
//        ─► squared norm and NaN/Inf flag ─► host memory (one copy down), or through it to the scratch area of NVMe
//
// Everything is enqueued on the caller's stream and on the d2h stream; the host waits only in wait_landed(). Pushes of
// one block may come in any order and mix with those of one other block; with more blocks open at once, a block that
// lands piece by piece is normed on the CPU afterwards (same bits). One thread at a time. Errors: kInvalidArgument.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "spillway/engine.h"
#include "src/plan/plan.h"
#include "swap/accumulator_places.h"
#include "swap/block_spiller.h"
#include "swap/timeline.h"

namespace spillway {

class GradientCollector {
 public:
  // `spiller`, for what is spilled to the store's space behind `scratch_offset`; may be null when nothing is, as
  // `accumulators` when none has its home in host memory.
  GradientCollector(const Plan& plan, const ModelDescription& model, DType type, Device& device, HostWorkers& workers,
                    std::span<std::byte> host, Stream& d2h, BlockSpiller* spiller = nullptr,
                    std::uint64_t scratch_offset = 0, Timeline* timeline = nullptr,
                    AccumulatorPlaces* accumulators = nullptr);
  ~GradientCollector();

  void begin_step();
  // Throws kInvalidArgument for a parameter that does not exist, another number of elements, and for memory outside of
  // HBM.
  void check(const Gradient& gradient) const;
  // False while the block's gradient is to pass through memory that others still lie in: one of them must be forgotten
  // before push() may be called.
  bool has_room(std::uint32_t block) const;
  // A visit begins in which gradients of the block are to come.
  void expect(std::uint32_t block);
  // True when the block is complete with it: on its way down.
  bool push(const Gradient& gradient, Stream& stream);
  bool begun() const;  // some gradient of the step has been pushed
  // With it the parameter has had all pushes of the step, and none of them a gradient.
  bool leaves_out(const Gradient& gradient) const;
  // Throws kInvalidArgument naming the first parameter whose gradient is missing.
  void check_complete() const;
  // A complete block: its gradient is where the update reads it, its norm known.
  bool landed(std::uint32_t block) const;
  void wait_landed(std::uint32_t block);
  bool finite(std::uint32_t block) const { return host_norm(block).first_nonfinite == kAllFinite; }  // once landed
  // A landed gradient has been used: the memory that it passed through may take another.
  void forget(std::uint32_t block);

  // Blocks until nothing of what was pushed is under way.
  void settle();
  // The same with every gradient of the step complete: they are where the update reads them.
  void wait_landed();

  // Of a complete block, by parameter: whether a push brought a gradient.
  std::span<const std::uint8_t> brought(std::uint32_t block) const { return blocks_[block].brought; }

  // After wait_landed():
  double squared_norm_sum() const;
  std::optional<std::string> first_nonfinite() const;    // names parameter and block
  const std::byte* gradient(std::uint32_t block) const;  // host address, or HBM when gradients stay there
  struct Spilled {
    Extent extent;
    std::uint64_t checksum;
  };
  std::optional<Spilled> spilled(std::uint32_t tile) const;  // nothing: it is where gradient() says

  std::uint64_t h2d_bytes() const noexcept { return accumulators_ ? accumulators_->h2d_bytes() : 0; }
  std::uint64_t d2h_bytes() const noexcept {
    return d2h_bytes_ + (spiller_ ? spiller_->copied_bytes() : 0) + (accumulators_ ? accumulators_->d2h_bytes() : 0);
  }

 private:
  struct BlockState {
    std::vector<std::uint32_t> pushes;     // per parameter
    std::vector<std::uint8_t> brought;     // per parameter: one of them had a gradient
    std::vector<std::uint8_t> in_staging;  // per parameter: rounded there, not yet on its way down
    std::uint32_t open = 0;                // parameters that expect more pushes
    std::optional<std::uint32_t> staging;
    std::optional<std::uint32_t> passing;  // the memory that it passes through
    bool piecewise = false;                // parts of it have gone down on their own: its norm is not known yet
    std::unique_ptr<Event> landed;         // recorded when the block is complete
  };
  struct Staging {
    std::optional<std::uint32_t> block;
    std::unique_ptr<Event> filled, free;
    std::unique_ptr<BlockSpill> spill;            // null when nothing is spilled
    std::optional<std::uint32_t> spilling_block;  // its spill was started and not yet waited for
  };

  std::optional<std::uint32_t> free_passing(std::uint32_t block) const;
  std::byte* host_gradient(std::uint32_t block) const;
  bool accumulates(std::uint32_t block) const;
  float* accumulator(std::uint32_t block, Stream& stream);  // once `stream` gets there
  std::uint32_t next_staging_for(std::uint32_t block) const;
  std::byte* staging_for(std::uint32_t block, Stream& stream);
  void start_spill(Staging& staging, std::uint32_t block, const std::byte* from);
  void finish_spill(Staging& staging);
  void send_down(std::uint32_t block, Stream& stream);
  void round_into(std::byte* staging, std::uint32_t block, std::uint32_t parameter, const void* from, DType type,
                  Stream& stream);
  void fill_zeros(std::byte* staging, std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                  Stream& stream);
  void complete(std::uint32_t block, Stream& stream);
  NormResult& host_norm(std::uint32_t block) const;
  std::byte* hbm(std::uint64_t offset) const { return device_.hbm().data() + offset; }

  const Plan& plan_;
  const ModelDescription& model_;
  DType type_;
  Device& device_;
  HostWorkers& workers_;
  std::span<std::byte> host_;
  Stream& d2h_;
  BlockSpiller* spiller_;
  const std::uint64_t scratch_offset_;
  std::vector<std::uint64_t> spilled_checksums_;  // by tile
  Timeline* timeline_;
  AccumulatorPlaces* accumulators_;
  std::vector<BlockState> blocks_;
  std::vector<Staging> staging_;
  std::vector<std::optional<std::uint32_t>> passing_;  // whose gradient lies there
  std::uint32_t next_staging_ = 0;
  std::optional<std::uint32_t> accumulator_owner_;  // block that uses the shared accumulator
  std::unique_ptr<Event> last_copy_, rounded_;
  std::vector<double> leaves_;  // for norms on the CPU
  std::uint64_t d2h_bytes_ = 0;
};

}  // namespace spillway
