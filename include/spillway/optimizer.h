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
// Arrays belong to the caller. Any thread; threads that share a tile take ranges that do not overlap (of 1,024 elements
// or more, or they share cache lines). Nothing is allocated. A host program's floating-point environment (flush to
// zero, rounding) changes no bit. Wrong arguments are failed checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "spillway/dtype.h"

namespace spillway {

enum class OptimizerKind : std::uint8_t { kAdam, kAdagrad, kLion, kSgd };

constexpr std::string_view name_of(OptimizerKind kind) {
  constexpr std::string_view kNames[] = {"Adam", "Adagrad", "Lion", "SGD"};
  return kNames[static_cast<std::size_t>(kind)];
}

// The fp32 arrays that an optimizer keeps beside the weight.
constexpr bool has_exp_avg(OptimizerKind kind) { return kind != OptimizerKind::kAdagrad; }
constexpr bool has_exp_avg_sq(OptimizerKind kind) {
  return kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdagrad;
}
constexpr std::uint32_t moments_of(OptimizerKind kind) { return has_exp_avg(kind) + has_exp_avg_sq(kind); }

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
  bool nesterov = false;  // SGD
};

// Arrays of `count` elements; any alignment, no overlap.
//   fp32: weight float.   bf16: weight and residual as in spillway/bf16.h.   fp16: weight, and master float.
struct OptimizerTile {
  DType type = DType::kFloat32;      // of weight and gradient
  void* weight = nullptr;            // updated; fp16: only written, the master rounded to nearest, ties to even
  std::int16_t* residual = nullptr;  // updated; bf16 only
  float* master = nullptr;           // updated; fp16 only
  float* exp_avg = nullptr;          // updated; null when the optimizer has none
  float* exp_avg_sq = nullptr;       // ditto
  const void* gradient = nullptr;
  std::size_t count = 0;
};

// What a step multiplies with.
struct OptimizerScalars {
  OptimizerKind kind = OptimizerKind::kAdam;
  bool l2 = false, decoupled = false, nesterov = false;
  float gradient_scale = 1;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;  // SGD: momentum and 1 - dampening first
  float inv_sqrt_bias2 = 1, epsilon = 0;
  float step_size = 0;
  float l2_decay = 0;           // weight_decay when l2, else 0 …
  float negative_lr_decay = 0;  // -lr * weight_decay when decoupled, else 0
};

// The scalars of optimizer step `step` (1 is the first).
OptimizerScalars optimizer_scalars(const OptimizerConfig& config, std::uint64_t step, double gradient_scale);

// Updates elements [begin, end) of the tile on the calling thread. False when a new weight (the rounded one too) or
// moment is not finite; the arrays are then written all the same.
bool optimizer_update(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end);

}  // namespace spillway
