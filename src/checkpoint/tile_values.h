// The values of a tile, in and out: fp32 numbers of named parameters on one side, weights, residuals and states in the
// layout of a tile on the other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "kernels/moment_codes.h"
#include "spillway/engine.h"
#include "src/plan/plan.h"
#include "swap/tile_mover.h"

namespace spillway {

// Asks `source` for every parameter value of the tile and writes weights and residuals; the states stay as they are.
// `only`, here and below: of that parameter of the block alone, and the others stay, too.
void fill_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, const WeightSource& source,
               std::optional<std::uint32_t> only = {});

// `source`, which must outlive the result as the model must, for weights of that type: kInvalidArgument names a
// parameter with a value that is not finite, or that rounds to infinity, and where it is. Training would find it in a
// gradient, and blame the learning rate. Infinity may be meant where it is frozen, as a mask is.
WeightSource finite_weights(const ModelDescription& model, DType type, const WeightSource& source);
// The same for values of one, from its element `first` on.
void check_weights(const Parameter& parameter, DType type, std::uint64_t first, std::span<const float> values);

// kInvalidArgument for a moment that is not finite, negative where it is a square, or more than its form holds.
void check_moments(const Parameter& parameter, Moment moment, MomentFormat format, std::uint64_t first,
                   std::span<const float> values);

// Hands every parameter value of the tile to `sink`: the exact fp32 master, or the weight widened to fp32.
void read_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, bool exact, const WeightSink& sink,
               std::optional<std::uint32_t> only = {});

// The weight of that type beside a master, widened to fp32: what forward and backward use.
float trained_weight(float master, DType type);

// The same of a moment; the tile is trainable, and its optimizer keeps that moment. Where states are not exact, values
// are widened, and rounded by `rounding_key` (see encode_moments()).
void fill_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment,
                 const WeightSource& source, std::uint64_t rounding_key, std::optional<std::uint32_t> only = {});
void read_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment, const WeightSink& sink,
                 std::optional<std::uint32_t> only = {});

}  // namespace spillway
