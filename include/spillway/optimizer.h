// Fused optimizers over plain arrays, on the CPU: one pass over memory, the same bits on every instruction set. They
// can be used without the rest of Spillway; tests/kernels/optimizer_example.cc is a program that does.
//
// In this order, each line one rounding, fma where written, all in fp32. First of all g = gradient * gradient_scale;
// where weight decay is L2, g = fma(weight_decay, w, g).
//
//   Adam      m = fma(beta1, m, (1 - beta1) * g)           exp_avg
//             v = fma(beta2, v, ((1 - beta2) * g) * g)     exp_avg_sq
//             d = fma(sqrt(v), inv_sqrt_bias2, epsilon)
//             u = m / d
//             AdamW: w = fma(-lr * weight_decay, w, w)
//             w = fma(-lr / bias1, u, w)
//   Adagrad   v = fma(g, g, v)                             exp_avg_sq holds the sum of squares
//             u = g / (sqrt(v) + epsilon)
//             w = fma(-lr, u, w)
//   Lion      c = fma(beta1, m, (1 - beta1) * g)           m is exp_avg
//             u = c > 0 ? 1 : c < 0 ? -1 : c
//             w = fma(-lr * weight_decay, w, w)            (always decoupled)
//             w = fma(-lr, u, w)
//             m = fma(beta2, m, (1 - beta2) * g)
//   SGD       m = fma(momentum, m, (1 - dampening) * g)    m is exp_avg; the first step takes g whole
//             u = nesterov ? fma(momentum, m, g) : m
//             w = fma(-lr, u, w)
//
// Scalars are computed once, in double, and rounded once. Sources: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter
// 2019, algorithm 2; Duchi et al. 2011; Chen et al. 2023, algorithm 2 (Lion); Sutskever et al. 2013 (momentum).
//
// Moments of Adam and Lion may be stored in fewer bytes. An update decodes them, runs the lines above in fp32, and
// encodes what came out; the master weight is exact in every form. Each operation here is one rounding as well:
//
//   bf16   x -> (bits(x) + random16) >> 16, so the mean of many roundings is x
//   int8   exp_avg: groups of 32 with scale s, their largest |m| rounded up to bf16; softsign, to nearest, ties to even
//            code = nearest(m / (s + |m|) * 254)       -127 to 127; 0 where s is 0
//            m    = code / (254 - |code|) * s
//          exp_avg_sq: groups of 32 with scale s, their largest sqrt(v) rounded up to bf16; square root, stochastically
//            code = floor(sqrt(v) * (255 / s) + random16 * 2^-16)      0 to 255; at least 1 where v > 0
//            v    = (code * (s / 255))^2
//
// Code 0 of exp_avg_sq means exactly 0: a small v that became 0 would let the next step divide its moment by epsilon.
// Its codes are rounded stochastically because beta2 = 0.999 moves sqrt(v) by a twentieth of a percent a step, and a
// code is 0.4 % at least: rounded to nearest, sqrt(v) would grow and never shrink. Fewer than 32 elements at the end of
// a tile are a group. Sources: FlashOptim (arXiv 2602.23349), for companding and the group's size.
//
// random16 is of a generator without state, keyed by (seed, step, array, model-wide index of the element); so it does
// not depend on tiles, threads or devices: kernels/moments.h.
//
// Arrays belong to the caller. Any thread; threads that share a tile take ranges that do not overlap (of 1,024 elements
// or more, or they share cache lines). Nothing is allocated. A host program's floating-point environment (flush to
// zero, rounding) changes no bit. Wrong arguments are failed checks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "spillway/dtype.h"

namespace spillway {

enum class OptimizerKind : std::uint8_t { kAdam, kAdagrad, kLion, kSgd };
inline constexpr std::array kOptimizerKinds = {OptimizerKind::kAdam, OptimizerKind::kAdagrad, OptimizerKind::kLion,
                                               OptimizerKind::kSgd};

constexpr std::string_view name_of(OptimizerKind kind) {
  constexpr std::array<std::string_view, kOptimizerKinds.size()> kNames = {"Adam", "Adagrad", "Lion", "SGD"};
  return kNames[static_cast<std::size_t>(kind)];
}

// The fp32 arrays that an optimizer keeps beside the weight.
constexpr bool has_exp_avg(OptimizerKind kind) { return kind != OptimizerKind::kAdagrad; }
constexpr bool has_exp_avg_sq(OptimizerKind kind) {
  return kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdagrad;
}
constexpr std::uint32_t moments_of(OptimizerKind kind) { return has_exp_avg(kind) + has_exp_avg_sq(kind); }

// What moments are stored as. kFloat32 is exact, and all that Adagrad and SGD have.
enum class MomentFormat : std::uint8_t { kFloat32, kBFloat16, kInt8 };
inline constexpr std::array kMomentFormats = {MomentFormat::kFloat32, MomentFormat::kBFloat16, MomentFormat::kInt8};
inline constexpr auto kReducedFormats = std::span(kMomentFormats).subspan<1>();

constexpr std::string_view name_of(MomentFormat format) {
  constexpr std::array<std::string_view, kMomentFormats.size()> kNames = {"fp32", "bf16", "int8"};
  return kNames[static_cast<std::size_t>(format)];
}
constexpr std::size_t size_of(MomentFormat format) {  // bytes of a moment, without its group's scale
  constexpr std::array<std::size_t, kMomentFormats.size()> kBytes = {4, 2, 1};
  return kBytes[static_cast<std::size_t>(format)];
}
constexpr bool has_scales(MomentFormat format) { return format == MomentFormat::kInt8; }
constexpr bool can_reduce(OptimizerKind kind) { return kind == OptimizerKind::kAdam || kind == OptimizerKind::kLion; }
inline constexpr std::size_t kMomentGroup = 32;  // elements that share a scale

// Hyper-parameters by the names that users know; each optimizer reads its own.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdam;
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  // Adam, Lion
  double epsilon = 1e-8;              // Adam, Adagrad
  double weight_decay = 0;
  bool decoupled_decay = true;  // Adam: AdamW; false: L2. Adagrad and SGD are always L2, Lion never
  bool bias_correction = true;  // Adam
  double momentum = 0, dampening = 0;
  bool nesterov = false;   // SGD
  std::uint64_t seed = 0;  // of the rounding of reduced moments
};

// Moments in another form than fp32.
struct ReducedMoments {
  MomentFormat format = MomentFormat::kFloat32;
  void* exp_avg = nullptr;                     // bf16: std::uint16_t; int8: std::int8_t
  void* exp_avg_sq = nullptr;                  // bf16: std::uint16_t; int8: std::uint8_t. Null for Lion
  std::uint16_t* exp_avg_scales = nullptr;     // int8: bf16, one for 32 elements; the last group may be shorter
  std::uint16_t* exp_avg_sq_scales = nullptr;  // ditto
  std::uint64_t index = 0;                     // of the tile's first element among all of the model
};

// Arrays of `count` elements; any alignment, no overlap.
//   fp32: weight float.   bf16: weight and residual as in spillway/bf16.h.   fp16: weight, and master float.
struct OptimizerTile {
  DType type = DType::kFloat32;      // of weight and gradient
  void* weight = nullptr;            // updated; fp16: only written, the master rounded to nearest, ties to even
  std::int16_t* residual = nullptr;  // updated; bf16 only
  float* master = nullptr;           // updated; fp16 only
  float* exp_avg = nullptr;          // updated; null when the optimizer has none, or `reduced` has it
  float* exp_avg_sq = nullptr;       // ditto
  const void* gradient = nullptr;
  std::size_t count = 0;
  ReducedMoments reduced = {};  // updated
};

// What a step multiplies with.
struct OptimizerScalars {
  OptimizerKind kind = OptimizerKind::kAdam;
  bool l2 = false, decoupled = false, nesterov = false;
  float gradient_scale = 1;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;  // SGD: momentum and 1 - dampening first
  float inv_sqrt_bias2 = 1, epsilon = 0;
  float step_size = 0;
  float l2_decay = 0;              // weight_decay when l2, else 0 …
  float negative_lr_decay = 0;     // -lr * weight_decay when decoupled, else 0
  std::uint64_t rounding_key = 0;  // of seed and step
};

// The scalars of optimizer step `step` (1 is the first).
OptimizerScalars optimizer_scalars(const OptimizerConfig& config, std::uint64_t step, double gradient_scale);

// Updates elements [begin, end) of the tile on the calling thread; with int8 moments both are multiples of 32, or the
// tile's end. False when a new weight (the rounded one too) or moment is not finite, or a moment is beyond what its
// form holds (3.38e38 of bf16, 1.69e38 of int8); the arrays are then written all the same.
bool optimizer_update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end);

}  // namespace spillway
