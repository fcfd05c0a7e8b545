// Values of single parameters, out of the engine and into it: master, moments and gradient.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <span>
#include <vector>

#include "kernels/moments.h"
#include "spillway/bf16.h"
#include "spillway/error.h"
#include "spillway/fp16.h"
#include "spillway/optimizer.h"
#include "src/checkpoint/tile_values.h"
#include "src/engine/step_engine.h"
#include "src/plan/state_sections.h"

namespace spillway {

struct StepEngine::NamedValues {
  const char* call;
  ParameterValues of;
  std::uint32_t block, parameter;
};

namespace {

constexpr std::uint64_t kShownAtOnce = 64 * 1024;

Moment moment_of(ParameterValues of) { return of == ParameterValues::kExpAvg ? Moment::kExpAvg : Moment::kExpAvgSq; }

float widened(const std::byte* from, DType type, std::uint64_t at) {
  if (type == DType::kFloat32) return reinterpret_cast<const float*>(from)[at];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(from)[at];
  return type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

void round_to(std::byte* to, DType type, std::uint64_t at, float value) {
  switch (type) {
    case DType::kFloat32: reinterpret_cast<float*>(to)[at] = value; return;
    case DType::kFloat16: reinterpret_cast<std::uint16_t*>(to)[at] = float_to_fp16(value); return;
    case DType::kBFloat16: reinterpret_cast<std::uint16_t*>(to)[at] = float_to_bf16(value); return;
  }
}

}  // namespace

void StepEngine::refuse_ranks(const char* call) const {
  if (agreement_.alone()) return;
  throw Error(Code::kUnsupported, {call, "single parameters are shown and set on one rank alone", 0,
                                   "export all weights, or save a snapshot"});
}

void StepEngine::check(const NamedValues& values) const {
  const auto& [call, of, block, parameter] = values;
  refuse_ranks(call);
  if (block >= model_.blocks.size() || parameter >= model_.blocks[block].parameters.size())
    throw Error(Code::kInvalidArgument, {call, fmt::format("there is no parameter {} of a block {}", parameter, block),
                                         0, "count both from 0, as the model describes them"});
  const Parameter& named = model_.blocks[block].parameters[parameter];
  if (of == ParameterValues::kMaster) return;
  const OptimizerKind kind = config_.optimizer.kind;
  const bool kept =
      of == ParameterValues::kGradient || (of == ParameterValues::kExpAvg ? has_exp_avg(kind) : has_exp_avg_sq(kind));
  if (!named.trainable || !kept)
    throw Error(Code::kInvalidArgument,
                {named.name, "has no such values", 0, "ask for what the optimizer keeps of it"});
  if (of != ParameterValues::kGradient) return;
  if (!stepping_ || machinery_.pushes->open(block))
    throw Error(Code::kInvalidArgument, {named.name, "has no gradient yet: some of its block are still to come", 0,
                                         "ask behind the step's last backward pass, and before step()"});
  const BlockPlan& plan = plan_.blocks[block];
  if (plan.early || (!plan_.gradients_in_hbm && plan.gradient_home != Home(Placement::kHost)))
    throw Error(Code::kUnsupported,
                {named.name, plan.early ? "its block is updated inside backward" : "its gradient lies on nvme", 0,
                 plan.early ? "set gradient_clipping, or raise spillway.host_bytes" : "raise spillway.host_bytes"});
}

// Nothing of it is under way, and tiles' buffers are free.
void StepEngine::wait_gradient(std::uint32_t block) {
  machinery_.gradients->settle();
  machinery_.gradients->wait_landed(block);
  machinery_.tiles->cancel_read_ahead();
  machinery_.mover->finish_saves();
}

// The tiles that the parameter lies in. A failure of `work` is the caller's own; where it saves it must not fail.
void StepEngine::look_at_tiles(const NamedValues& values, const TileWork& work, bool saves) {
  std::exception_ptr failure;
  TileMover& mover = *machinery_.mover;
  machinery_.tiles->cancel_read_ahead();
  machinery_.mover->finish_saves();
  const BlockPlan& block = plan_.blocks[values.block];
  const ParameterPlace& place = block.partition.parameters[values.parameter];
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles && !failure; ++t) {
    const TileRange& range = plan_.tiles[t].range;
    if (range.first >= place.first + place.count || place.first >= range.first + range.count) continue;
    mover.start_load(t, 0);
    const TileMemory memory = mover.finish_load(0);
    try {
      work(t, memory);
    } catch (...) {
      failure = std::current_exception();
    }
    if (!saves || failure) {
      mover.drop(0);
      continue;
    }
    mover.start_save(0, Save::kNew);
    mover.finish_save(0);
  }
  if (failure) std::rethrow_exception(failure);
}

void StepEngine::read_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter, const WeightSink& sink) {
  const auto turn = caller_.enter("read_values");
  const NamedValues values{"read_values", of, block, parameter};
  std::exception_ptr of_sink;
  const WeightSink guarded_sink = [&](auto b, auto p, auto first, std::span<const float> piece) {
    try {
      if (!of_sink) sink(b, p, first, piece);
    } catch (...) {
      of_sink = std::current_exception();  // the caller's own failure, behind which the engine goes on
    }
  };
  guarded([&] {
    check(values);
    if (of == ParameterValues::kGradient) {
      const std::uint64_t count = plan_.blocks[block].partition.parameters[parameter].count;
      std::vector<std::byte> rounded(count * size_of(config_.weights));
      wait_gradient(block);
      machinery_.gradients->read(block, parameter, rounded);
      std::vector<float> piece(std::min(count, kShownAtOnce));
      for (std::uint64_t first = 0; first < count; first += piece.size()) {
        piece.resize(std::min<std::uint64_t>(piece.size(), count - first));
        for (std::uint64_t i = 0; i < piece.size(); ++i) piece[i] = widened(rounded.data(), config_.weights, first + i);
        guarded_sink(block, parameter, first, piece);
      }
      return;
    }
    make_ready("read_values");
    settle();
    const auto show = [&](std::uint32_t tile, const TileMemory& memory) {
      if (of == ParameterValues::kMaster) return read_tile(plan_, tile, memory, true, guarded_sink, parameter);
      read_moment(plan_, tile, memory, moment_of(of), guarded_sink, parameter);
    };
    look_at_tiles(values, show, false);
  });
  if (of_sink) std::rethrow_exception(of_sink);
}

// All values are there and checked before the first tile is touched: what lives in memory is there once.
void StepEngine::write_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter,
                              const WeightSource& source) {
  const auto turn = caller_.enter("write_values");
  refuse_if_failed();
  const NamedValues named{"write_values", of, block, parameter};
  check(named);
  refuse_leases("write_values");
  std::vector<float> values(plan_.blocks[block].partition.parameters[parameter].count);
  source(block, parameter, 0, values);
  const Parameter& described = model_.blocks[block].parameters[parameter];
  if (of == ParameterValues::kExpAvg || of == ParameterValues::kExpAvgSq) {
    check_moments(described, moment_of(of), format_of(config_, described), 0, values);
  } else {
    check_weights(described, of == ParameterValues::kMaster ? config_.weights : DType::kFloat32, 0, values);
  }
  guarded([&] {
    make_ready("write_values");
    if (of == ParameterValues::kGradient) {
      std::vector<std::byte> rounded(values.size() * size_of(config_.weights));
      for (std::uint64_t i = 0; i < values.size(); ++i) round_to(rounded.data(), config_.weights, i, values[i]);
      wait_gradient(block);
      machinery_.gradients->write(block, parameter, rounded);
      return;
    }
    settle();
    turn_to(*machinery_.compute);  // what still reads weights comes before they change
    machinery_.compute->synchronize();
    machinery_.weights->forget();
    const WeightSource given = [&](auto, auto, std::uint64_t first, std::span<float> out) {
      std::ranges::copy(std::span(values).subspan(first, out.size()), out.begin());
    };
    const auto fill = [&](std::uint32_t tile, const TileMemory& memory) {
      if (of == ParameterValues::kMaster) return fill_tile(plan_, tile, memory, given, parameter);
      fill_moment(plan_, tile, memory, moment_of(of), given, rounding_key(config_.optimizer.seed, step_), parameter);
    };
    look_at_tiles(named, fill, true);
    if (machinery_.store) commit();
  });
}

}  // namespace spillway
