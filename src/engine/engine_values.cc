// Values of single parameters, out of the engine and into it: master, moments and gradient. It goes tile by tile, as
// far as the parameter lies in them; how values travel between ranks is said in rank_values.h.
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

namespace {

constexpr std::uint64_t kShownAtOnce = 64 * 1024;
constexpr char kHalfWritten[] = "values of a parameter were being written";  // until all of them are

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

void StepEngine::check(const AskedValues& asked) const {
  const bool reads = asked.call == AskedValues::Call::kRead;
  const char* const call = reads ? "read_values" : "write_values";
  if (asked.block >= model_.blocks.size() || asked.parameter >= model_.blocks[asked.block].parameters.size())
    throw Error(Code::kInvalidArgument,
                {call, fmt::format("there is no parameter {} of a block {}", asked.parameter, asked.block), 0,
                 "count both from 0, as the model describes them"});
  if (asked.from >= agreement_.rank().count)
    throw Error(Code::kInvalidArgument, {call, fmt::format("there is no rank {}", asked.from), 0,
                                         "name the rank that gives the values, from 0"});
  if (!reads) refuse_leases(call);
  const Parameter& named = model_.blocks[asked.block].parameters[asked.parameter];
  if (asked.of == ParameterValues::kMaster) return;
  const OptimizerKind kind = config_.optimizer.kind;
  const bool kept = asked.of == ParameterValues::kGradient ||
                    (asked.of == ParameterValues::kExpAvg ? has_exp_avg(kind) : has_exp_avg_sq(kind));
  if (!named.trainable || !kept)
    throw Error(Code::kInvalidArgument,
                {named.name, "has no such values", 0, "ask for what the optimizer keeps of it"});
  if (asked.of != ParameterValues::kGradient) return;
  if (!stepping_ || resources_.pushes->open(asked.block))
    throw Error(Code::kInvalidArgument, {named.name, "has no gradient yet: its block still expects some", 0,
                                         "ask after the step's last backward pass, and before step()"});
  const BlockPlan& plan = plan_.blocks[asked.block];
  if (plan.early || (!plan_.gradients_in_hbm && plan.gradient_home != Home(Placement::kHost)))
    throw Error(Code::kUnsupported,
                {named.name, plan.early ? "its block is updated inside backward" : "its gradient lies on nvme", 0,
                 plan.early ? "set gradient_clipping, or raise spillway.host_bytes" : "raise spillway.host_bytes"});
}

// Before the first tile is touched: what lives in memory is there once.
void StepEngine::check_given(const AskedValues& asked, std::span<const float> values) const {
  const Parameter& described = model_.blocks[asked.block].parameters[asked.parameter];
  const std::uint64_t count = plan_.blocks[asked.block].partition.parameters[asked.parameter].count;
  if (values.size() != count)
    throw Error(Code::kInvalidArgument,
                {described.name, fmt::format("has {} values, and is given {}", count, values.size()), 0,
                 "give one for each of its elements"});
  if (asked.of == ParameterValues::kExpAvg || asked.of == ParameterValues::kExpAvgSq) {
    check_moments(described, moment_of(asked.of), format_of(config_, described), 0, values);
  } else {
    check_weights(described, asked.of == ParameterValues::kMaster ? config_.weights : DType::kFloat32, 0, values);
  }
}

// Nothing of it is under way, and tiles' buffers are free.
void StepEngine::wait_gradient(std::uint32_t block) {
  resources_.gradients->wait_idle();
  resources_.gradients->wait_landed(block);
  resources_.tiles->cancel_read_ahead();
  resources_.mover->finish_saves();
}

// This rank's tiles that the parameter lies in. A failure of `work` is the caller's own; where it saves it must not
// fail.
void StepEngine::read_tiles(const AskedValues& asked, const TileWork& work, bool saves) {
  std::exception_ptr failure;
  TileMover& mover = *resources_.mover;
  resources_.tiles->cancel_read_ahead();
  resources_.mover->finish_saves();
  const BlockPlan& block = plan_.blocks[asked.block];
  const ParameterPlace& place = block.partition.parameters[asked.parameter];
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles && !failure; ++t) {
    const TileRange& range = plan_.tiles[t].range;
    if (range.first >= place.first + place.count || place.first >= range.first + range.count) continue;
    // One buffer is enough: few tiles hold one parameter, and nothing else goes on meanwhile.
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

void StepEngine::read_gradient(const AskedValues& asked, const Shard& own, const ValueSink& put) {
  const std::uint64_t begin = first_of_gradient(plan_.blocks[asked.block], asked.parameter, own);
  std::vector<float> piece(std::min(own.count, kShownAtOnce));
  std::vector<std::byte> rounded(piece.size() * size_of(config_.weights));
  for (std::uint64_t at = 0; at < own.count; at += piece.size()) {
    piece.resize(std::min<std::uint64_t>(piece.size(), own.count - at));
    resources_.gradients->read(asked.block, begin + at,
                               std::span(rounded).first(piece.size() * size_of(config_.weights)));
    for (std::uint64_t i = 0; i < piece.size(); ++i) piece[i] = widened(rounded.data(), config_.weights, i);
    put(own.first + at, piece);
  }
}

void StepEngine::read_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter, const WeightSink& sink) {
  const auto turn = caller_.enter("read_values");
  const AskedValues asked{.of = of, .block = block, .parameter = parameter};
  std::exception_ptr of_sink;
  const ValueSink guarded_sink = [&](std::uint64_t first, std::span<const float> piece) {
    try {
      if (!of_sink) sink(block, parameter, first, piece);
    } catch (...) {
      of_sink = std::current_exception();  // the caller's own failure, after which the engine goes on
    }
  };
  guarded([&] {
    refuse_other_values(agreement_, asked, model_);
    agreement_.all([&] { check(asked); });
    const std::vector<Shard> parts = parts_of(plan_.blocks[block], parameter);
    if (of == ParameterValues::kGradient) {
      wait_gradient(block);
    } else {
      make_ready("read_values");
      finish_step();
    }
    const auto bring = [&](const ValueSink& put) {
      if (of == ParameterValues::kGradient) return read_gradient(asked, parts[plan_.rank.index], put);
      const WeightSink to = [&](auto, auto, std::uint64_t first, std::span<const float> piece) { put(first, piece); };
      const auto show = [&](std::uint32_t tile, const TileMemory& memory) {
        if (of == ParameterValues::kMaster) return read_tile(plan_, tile, memory, true, to, parameter);
        read_moment(plan_, tile, memory, moment_of(of), to, parameter);
      };
      read_tiles(asked, show, false);
    };
    visit_values(agreement_, parts, bring, guarded_sink);
    of_sink = joint_failure(agreement_, of_sink);
  });
  if (of_sink) std::rethrow_exception(of_sink);
}

void StepEngine::write_gradient(const AskedValues& asked, const Shard& own, GivenValues& given) {
  const std::uint64_t begin = first_of_gradient(plan_.blocks[asked.block], asked.parameter, own);
  std::vector<float> piece(std::min(own.count, kShownAtOnce));
  std::vector<std::byte> rounded(piece.size() * size_of(config_.weights));
  for (std::uint64_t at = 0; at < own.count; at += piece.size()) {
    piece.resize(std::min<std::uint64_t>(piece.size(), own.count - at));
    given.take(own.first + at, piece);
    for (std::uint64_t i = 0; i < piece.size(); ++i) round_to(rounded.data(), config_.weights, i, piece[i]);
    resources_.gradients->write(asked.block, begin + at,
                                std::span(rounded).first(piece.size() * size_of(config_.weights)));
  }
}

void StepEngine::write_tiles_of(const AskedValues& asked, GivenValues& given) {
  const WeightSource source = [&](auto, auto, std::uint64_t first, std::span<float> out) { given.take(first, out); };
  const std::uint64_t key = rounding_key(config_.optimizer.seed, step_);
  read_tiles(
      asked,
      [&](std::uint32_t tile, const TileMemory& memory) {
        if (asked.of == ParameterValues::kMaster) return fill_tile(plan_, tile, memory, source, asked.parameter);
        fill_moment(plan_, tile, memory, moment_of(asked.of), source, key, asked.parameter);
      },
      true);
}

void StepEngine::write_values(ParameterValues of, std::uint32_t block, std::uint32_t parameter,
                              std::span<const float> values, std::uint32_t from) {
  const auto turn = caller_.enter("write_values");
  const AskedValues asked{
      .call = AskedValues::Call::kWrite, .of = of, .block = block, .parameter = parameter, .from = from};
  guarded([&] {
    refuse_other_values(agreement_, asked, model_);
    agreement_.all([&] {
      check(asked);
      if (agreement_.rank().index == from) check_given(asked, values);
    });
    make_ready("write_values");
    const std::vector<Shard> parts = parts_of(plan_.blocks[block], parameter);
    GivenValues given(agreement_, from, plan_.blocks[block].partition.parameters[parameter].count, values);
    if (of == ParameterValues::kGradient) {
      wait_gradient(block);
      failure_ = kHalfWritten;
      given.to([&] { write_gradient(asked, parts[plan_.rank.index], given); });
      // The block's part of the norm was taken of the old values.
      resources_.gradients->norm_again(block);
      failure_.clear();
      return;
    }
    finish_step();
    turn_to(*resources_.compute);  // what still reads weights comes before they change
    resources_.compute->synchronize();
    // What lies in HBM has the old values.
    resources_.weights->forget();
    // From here on a failure leaves values half written, and `failure_` keeps later calls from going on with them.
    failure_ = kHalfWritten;
    given.to([&] { write_tiles_of(asked, given); });
    if (resources_.store) {
      // What was written is durable when the call returns.
      agreement_.all([&] { commit(); });
      resources_.store->note_all_committed();
    }
    failure_.clear();
  });
}

}  // namespace spillway
