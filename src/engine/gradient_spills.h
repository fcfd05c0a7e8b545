// Gradients on their way from staging to the store's scratch area, one for each staging at a time. It knows which
// pieces belong to which tile, where they lie in the scratch area, and which checksums they must have when they are
// read again. The copies and writes are the BlockSpiller's (swap/block_spiller.h); the way back is
// TileMover::load_gradient(). One thread at a time. Errors: kIo.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/device.h"
#include "src/plan/plan.h"
#include "swap/block_spiller.h"

namespace spillway {

class GradientSpills {
 public:
  // `scratch_offset`: of the area, in the store's space. Plan and spiller must outlive it.
  GradientSpills(const Plan& plan, Device& device, BlockSpiller& spiller, std::uint64_t scratch_offset);
  ~GradientSpills();  // waits for what is under way

  // The block's gradient, which lies at `from` once `after` has come. The staging's last one must have been written.
  void start(std::uint32_t staging, std::uint32_t block, const std::byte* from, Event& after);
  // Blocks until what was started from there is written; at once when nothing was, or it has been waited for.
  void wait_written(std::uint32_t staging);

  struct Spilled {
    Extent extent;
    std::uint64_t checksum;
  };
  // Nothing: it is elsewhere. The checksum is known when it is written.
  std::optional<Spilled> spilled(std::uint32_t tile) const;
  std::uint64_t copied_bytes() const noexcept { return spiller_.copied_bytes(); }

 private:
  const Plan& plan_;
  BlockSpiller& spiller_;
  const std::uint64_t scratch_offset_;
  std::vector<std::unique_ptr<BlockSpill>> spills_;  // by staging
  std::vector<std::optional<std::uint32_t>> block_;  // ditto: its spill was started and not yet waited for
  std::vector<std::uint64_t> checksums_;             // by tile
};

}  // namespace spillway
