// How the partial sums of one parameter's gradient become one: each part of a step is summed by itself, and the parts
// are combined by a balanced binary tree, so that whoever has sums of whole subtrees, one rank or several, gets the
// same bits. Pure: it answers what to do with which slot; src/engine/gradients does the adding.
//
//   parts   0   1   2   3
//   slots   0─┬─1   1─┬─2
//             0───────1
//             0
//
// Where parts come in order, a part's slot is the number of subtrees that wait to its left: log2(parts) + 1 slots.
// Parts that come in any order have a slot each, and are combined at the end.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace spillway {

class PartSums {
 public:
  // `parts`: a power of two.
  PartSums(std::uint32_t parts, bool in_order) : in_order_(in_order), added_(parts) {}

  static constexpr std::uint32_t slots(std::uint32_t parts, bool in_order) {
    return in_order ? static_cast<std::uint32_t>(std::countr_zero(parts)) + 1 : parts;
  }

  void begin_step() {
    next_ = 0;
    for (std::uint8_t& added : added_) added = 0;
  }
  // False: in order, and the part has been combined with others already.
  bool takes(std::uint32_t part) const { return !in_order_ || part >= next_; }

  struct At {
    std::uint32_t slot = 0;
    bool first = false;  // what is there counts for nothing
  };
  // The part is to be added to. Before that, what this asks for: zero(slot), and add(into, from) of two slots.
  template <typename Zero, typename Add>
  At open(std::uint32_t part, Zero&& zero, Add&& add) {
    if (in_order_) close_until(part, zero, add);
    const bool first = added_[part] == 0;
    added_[part] = 1;
    return {slot_of(part), first};
  }
  // No more is to come: the sum of all is in slot 0.
  template <typename Zero, typename Add>
  void finish(Zero&& zero, Add&& add) {
    close_until(static_cast<std::uint32_t>(added_.size()), zero, add);
  }

 private:
  // Of the subtree whose first part it is.
  std::uint32_t slot_of(std::uint32_t first) const {
    return in_order_ ? static_cast<std::uint32_t>(std::popcount(first)) : first;
  }
  // A part to which nothing was added counts as zeros.
  template <typename Zero, typename Add>
  void close_until(std::uint32_t end, Zero&& zero, Add&& add) {
    for (; next_ < end; ++next_) {
      if (added_[next_] == 0) zero(slot_of(next_));
      for (std::uint32_t width = 1; (next_ & width) != 0; width *= 2) {
        add(slot_of(next_ + 1 - 2 * width), slot_of(next_ + 1 - width));
      }
    }
  }

  bool in_order_;
  std::uint32_t next_ = 0;  // parts before it are complete, and combined as far as they go
  std::vector<std::uint8_t> added_;
};

}  // namespace spillway
