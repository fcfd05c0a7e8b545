// Values of one parameter among ranks, each of which owns a part of them: shown to all, or given by one rank to those
// that own them. They travel in pieces of 256 KiB, for which there is one buffer. Where the values lie in tiles is
// known in engine_values.cc.
//
// All ranks do each of this at the same time, with no other call between them meanwhile. What fails on one of them
// fails on all, and none of them waits for it. One thread at a time (the engine's). Errors: those of the Communicator.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "spillway/engine.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"

namespace spillway {

// Which values a call is for.
struct AskedValues {
  enum class Call : std::uint32_t { kRead, kWrite } call = Call::kRead;
  ParameterValues of = ParameterValues::kMaster;
  std::uint32_t block = 0, parameter = 0;
  std::uint32_t from = 0;  // whose are written
  bool operator==(const AskedValues&) const = default;
};

// Throws kInvalidArgument on every rank, naming one that asks for others than rank 0, and both.
void refuse_other_values(Agreement& agreement, const AskedValues& own, const ModelDescription& model);

// Of a parameter's elements, what each rank owns, by rank; one part where every rank has all of it.
std::vector<Shard> parts_of(const BlockPlan& block, std::uint32_t parameter);
// Where the part that this rank owns begins in what it has of the block's gradient.
std::uint64_t first_of_gradient(const BlockPlan& block, std::uint32_t parameter, const Shard& own);

// Values from the parameter's element `first` on.
using ValueSink = std::function<void(std::uint64_t first, std::span<const float> values)>;

// Calls `sink` with all values, in order, on every rank; it throws nothing. `bring`: gives its argument this rank's
// part, in order. Throws what failed in `bring` on the lowest rank where it did.
void visit_values(Agreement& agreement, std::span<const Shard> parts,
                  const std::function<void(const ValueSink& put)>& bring, const ValueSink& sink);

// The values that one rank gives to all.
class GivenValues {
 public:
  // `given`: of rank `from`, all `count` of them; not looked at on others.
  GivenValues(Agreement& agreement, std::uint32_t from, std::uint64_t count, std::span<const float> given);

  // Runs `work`, which takes this rank's part, on every rank; what the lowest rank threw, on all.
  void to(const std::function<void()>& work);
  // Those from element `first` on. Asked for in increasing order.
  void take(std::uint64_t first, std::span<float> out);

 private:
  void next();
  void pass_rest();

  Agreement& agreement_;
  const std::uint32_t from_;
  const std::uint64_t count_;
  const std::span<const float> given_;
  std::uint64_t first_ = 0, end_ = 0;  // of what is in the buffer
  std::vector<float> piece_;           // none with one rank
};

}  // namespace spillway
