// Fused Adam over plain arrays, on the CPU: one pass over memory, the same bits on every instruction set. It can be
// used without the rest of Spillway; tests/kernels/adam_example.cc is a program that does.
//
// In this order, each line one rounding, fma where written, all in fp32:
//   g = gradient * gradient_scale
//   L2 mode:     g = fma(weight_decay, w, g)
//   m = fma(beta1, m, (1 - beta1) * g)
//   v = fma(beta2, v, ((1 - beta2) * g) * g)
//   d = fma(sqrt(v), inv_sqrt_bias2, epsilon)
//   u = m / d
//   AdamW mode:  w = fma(-lr * weight_decay, w, w)
//   w = fma(-step_size, u, w)          step_size = lr / bias1
// Source: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2. Scalars are computed once, in double,
// and rounded once.
//
// Arrays belong to the caller. Any thread; threads that share a tile take ranges that do not overlap (of 1,024 elements
// or more, or they share cache lines). Nothing is allocated. A host program's floating-point environment (flush to
// zero, rounding) changes no bit. Wrong arguments are failed checks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spillway/dtype.h"

namespace spillway {

// Arrays of `count` elements; any alignment, no overlap.
//   fp32: weight float, residual null.   bf16: weight and residual as in spillway/bf16.h.
struct AdamTile {
  DType type = DType::kFloat32;      // of weight and gradient
  void* weight = nullptr;            // updated
  std::int16_t* residual = nullptr;  // updated; bf16 only
  float* exp_avg = nullptr;          // updated
  float* exp_avg_sq = nullptr;       // updated
  const void* gradient = nullptr;
  std::size_t count = 0;
};

struct AdamScalars {
  float gradient_scale = 1;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float inv_sqrt_bias2 = 1, epsilon = 0;
  float step_size = 0;
  float l2_decay = 0;           // weight_decay in L2 mode, else 0 …
  float negative_lr_decay = 0;  // -lr * weight_decay in AdamW mode, else 0
  bool l2 = false, decoupled = false;
};

struct AdamHyper {
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0;
  bool decoupled_decay = true, bias_correction = true;
};

// The scalars of optimizer step `step` (1 is the first).
AdamScalars adam_scalars(const AdamHyper& hyper, std::uint64_t step, double gradient_scale);

// Updates elements [begin, end) of the tile on the calling thread. False when a new weight, moment or variance is not
// finite; the arrays are then written all the same.
bool adam_update(const AdamTile& tile, const AdamScalars& scalars, std::size_t begin, std::size_t end);

}  // namespace spillway
