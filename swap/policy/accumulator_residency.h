// Which place in HBM a block's fp32 sums of gradients use, and whether they move. Pure: AccumulatorPlaces does what it
// says, and the schedule predicts it.
//
// Of the places that fit a block it gets the one that it has, else an empty one, else the one that was asked for
// longest ago. Sums that were added to are copied home when their place goes to another block, or when another block's
// sums come; after the copy they stay in the place too, until another block takes it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace spillway {

class AccumulatorResidency {
 public:
  // Every block of `block_bytes` that is brought fits one of the places. Nothing is allocated later on.
  AccumulatorResidency(std::vector<std::uint64_t> place_bytes, std::vector<std::uint64_t> block_bytes);

  struct Arrival {
    std::uint32_t place = 0;
    std::optional<std::uint32_t> leaves;  // the block whose sums go home from there before
    bool comes = false;                   // from home; else its sums are there, or begin anew
  };
  Arrival bring(std::uint32_t block);
  // The block whose sums go home from the place now; nothing when what is at home is no older.
  std::optional<std::uint32_t> leave(std::uint32_t place);
  // The block, which has a place, is added to. False: for the first time since it came there or was sent home.
  bool add(std::uint32_t block);
  // Its sums are used up; returns the place, which is empty.
  std::uint32_t complete(std::uint32_t block);
  // All sums are lost.
  void begin_step();

 private:
  struct PlaceState {
    std::uint64_t bytes = 0;
    std::optional<std::uint32_t> block;
    bool added = false;      // to what is at home
    std::uint64_t turn = 0;  // in which it was asked for
  };
  struct Block {
    std::uint64_t bytes = 0;
    std::optional<std::uint32_t> place;
    bool at_home = false;  // sums of it are, all of them when it has no place
  };

  std::uint32_t choose(std::uint32_t block) const;

  std::vector<PlaceState> places_;
  std::vector<Block> blocks_;
  std::uint64_t turn_ = 0;
};

}  // namespace spillway
