// Tiles with memory of their own, for the tests of the optimizers.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/fp16.h"
#include "spillway/optimizer.h"
#include "tests/kernels/random.h"

namespace spillway {

inline float gradient_value(DType type, std::uint16_t bits) {
  return type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// Copies share nothing.
struct OwnedTile {
  OwnedTile(DType dtype, OptimizerKind optimizer, std::size_t elements)
      : type(dtype), kind(optimizer), count(elements), weight(elements * size_of(dtype)), gradient(weight.size()) {
    if (type == DType::kBFloat16) residual.resize(count);
    if (type == DType::kFloat16) master.resize(count);
    if (has_exp_avg(kind)) exp_avg.resize(count);
    if (has_exp_avg_sq(kind)) exp_avg_sq.resize(count);
  }

  void set_weight(std::size_t i, float w) {
    if (type == DType::kFloat32) return put(weight, i, w);
    if (type == DType::kFloat16) {
      master[i] = w;
      return put(weight, i, float_to_fp16(w));
    }
    put(weight, i, split_master(w).weight);
    residual[i] = split_master(w).residual;
  }
  void set_gradient(std::size_t i, float g) {
    if (type == DType::kFloat32) return put(gradient, i, g);
    put(gradient, i, type == DType::kFloat16 ? float_to_fp16(g) : float_to_bf16(g));
  }
  void set(std::size_t i, float w, float m, float v, float g) {
    set_weight(i, w);
    set_gradient(i, g);
    if (!exp_avg.empty()) exp_avg[i] = m;
    if (!exp_avg_sq.empty()) exp_avg_sq[i] = v;
  }
  float weight_at(std::size_t i) const {  // the exact master
    if (type == DType::kFloat32) return get<float>(weight, i);
    return type == DType::kFloat16 ? master[i] : join_master({get<std::uint16_t>(weight, i), residual[i]});
  }
  float rounded_at(std::size_t i) const {  // what forward and backward read
    return type == DType::kFloat32 ? get<float>(weight, i) : gradient_value(type, get<std::uint16_t>(weight, i));
  }
  float gradient_at(std::size_t i) const {
    return type == DType::kFloat32 ? get<float>(gradient, i) : gradient_value(type, get<std::uint16_t>(gradient, i));
  }
  // Element i as it is in another tile.
  void take(const OwnedTile& from, std::size_t i) {
    std::memcpy(weight.data() + i * size_of(type), from.weight.data() + i * size_of(type), size_of(type));
    if (!residual.empty()) residual[i] = from.residual[i];
    if (!master.empty()) master[i] = from.master[i];
    if (!exp_avg.empty()) exp_avg[i] = from.exp_avg[i];
    if (!exp_avg_sq.empty()) exp_avg_sq[i] = from.exp_avg_sq[i];
  }

  // The tile from element `first` on, to vary alignment.
  OptimizerTile view(std::size_t first = 0) {
    const auto from = [first](auto& array) { return array.empty() ? nullptr : array.data() + first; };
    return {.type = type,
            .weight = weight.data() + first * size_of(type),
            .residual = from(residual),
            .master = from(master),
            .exp_avg = from(exp_avg),
            .exp_avg_sq = from(exp_avg_sq),
            .gradient = gradient.data() + first * size_of(type),
            .count = count - first};
  }

  DType type;
  OptimizerKind kind;
  std::size_t count;
  std::vector<std::byte> weight, gradient;
  std::vector<std::int16_t> residual;
  std::vector<float> master, exp_avg, exp_avg_sq;

 private:
  template <typename T>
  static void put(std::vector<std::byte>& array, std::size_t i, T value) {
    std::memcpy(array.data() + i * sizeof(T), &value, sizeof(T));
  }
  template <typename T>
  static T get(const std::vector<std::byte>& array, std::size_t i) {
    T value;
    std::memcpy(&value, array.data() + i * sizeof(T), sizeof(T));
    return value;
  }
};

// Finite in the tile's own type, and such that nothing overflows.
inline OwnedTile random_tile(DType type, OptimizerKind kind, std::size_t count, std::mt19937_64& generator) {
  OddFloats odd(generator);
  OwnedTile tile(type, kind, count);
  const auto fitting = [&] {
    const float x = odd();
    return type == DType::kFloat16 && (x > 6e4f || x < -6e4f) ? 6e4f / x : x;
  };
  for (std::size_t i = 0; i < count; ++i) tile.set(i, fitting(), odd(), std::abs(odd()), fitting());
  return tile;
}

}  // namespace spillway
