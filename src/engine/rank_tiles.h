// Shows the tiles of all ranks to each of them, one after the other in the order that one rank alone has: block by
// block, section by section, rank by rank. For what needs all of a model, an export or a snapshot.
//
//   RankTiles all(…, work);  show all.own() this rank's tiles, in order;  all.finish()
//
// It reads no tile: TileExecutor's tour brings this rank's (tile_executor.h). All ranks do this at the same time, with
// no other call between them meanwhile. What `work` throws ends the showing to it, and not the ranks' conversation:
// finish() returns it. With one rank it passes tiles on. One thread at a time (the engine's). Errors: those of the
// Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "src/comm/agreement.h"
#include "src/plan/plan.h"
#include "swap/tile_mover.h"
#include "swap/tile_walk.h"

namespace spillway {

class RankTiles {
 public:
  // `plan`: of the rank whose tile it is.
  using Work = std::function<void(const Plan& plan, std::uint32_t tile, const TileMemory& memory)>;

  // `plan_of`: another rank's. `buffer`: HostPlan::others.
  RankTiles(Agreement& agreement, const Plan& own, const std::function<Plan(Rank)>& plan_of,
            std::span<std::byte> buffer, Work work);

  TileWork own() {
    return [this](std::uint32_t tile, const TileMemory& memory) { visit_own(tile, memory); };
  }
  // What is left of the others'. The failure of `work` on this rank, or that of another's.
  std::exception_ptr finish();

 private:
  struct Turn {
    std::uint32_t rank = 0, tile = 0;
  };
  void order_turns();
  void visit_own(std::uint32_t tile, const TileMemory& memory);
  void visit_other(const Turn& turn);
  void visit(const Plan& plan, std::uint32_t tile, const TileMemory& memory);
  const Plan& plan_of(std::uint32_t rank) const { return rank == agreement_.rank().index ? own_ : others_[rank]; }

  Agreement& agreement_;
  const Plan& own_;
  std::vector<Plan> others_;  // by rank; this one's is not there
  const std::span<std::byte> buffer_;
  const Work work_;
  std::vector<Turn> turns_;
  std::size_t next_ = 0;
  std::exception_ptr failure_;
};

// This rank's failure in what its caller gave it, or that some other has had one.
std::exception_ptr joint_failure(Agreement& agreement, std::exception_ptr own);

}  // namespace spillway
