// Tiles and columns: softmax, sums. Rows lie in vector_rows-inl.h, packing in vector_packing-inl.h.
#include "tools/models/ops/vector_kernels.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/models/ops/vector_kernels.cc"
// Targets between these add nothing to loops of fp32 arithmetic but compile time.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include "hwy/foreach_target.h"  // includes this file once per target
#include "hwy/highway.h"
#include "tools/models/ops/vector_lanes-inl.h"
#include "tools/models/ops/vector_packing-inl.h"
#include "tools/models/ops/vector_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::models::HWY_NAMESPACE {
namespace {

template <typename T>
void widen(const void* in, float* out, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes v = io.read(typed<T>(in) + i, n);
    if (n == kLanes)
      store(v, out + i);
    else
      Tail<float>::write(v, out + i, n);
  });
}

template <typename T>
void narrow(const float* in, void* out, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    io.write(n == kLanes ? load(in + i) : Tail<float>::read(in + i, n), typed<T>(out) + i, n);
  });
}

template <typename T>
void add(const void* a, const void* b, void* out, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    io.write(io.read(typed<T>(a) + i, n) + io.read(typed<T>(b) + i, n), typed<T>(out) + i, n);
  });
}

template <typename T>
void accumulate(const void* in, float* sum, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes v = io.read(typed<T>(in) + i, n);
    if (n == kLanes)
      store(load(sum + i) + v, sum + i);
    else
      Tail<float>::write(Tail<float>::read(sum + i, n) + v, sum + i, n);
  });
}

template <typename T>
void scale(const void* in, float factor, void* out, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    io.write(io.read(typed<T>(in) + i, n) * splat(factor), typed<T>(out) + i, n);
  });
}

template <typename T>
void accumulate_scaled(const void* in, float factor, float* sum, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    using Sum = std::conditional_t<std::is_same_v<decltype(io), Full<T>>, Full<float>, Tail<float>>;
    Sum::write(Sum::read(sum + i, n) + io.read(typed<T>(in) + i, n) * splat(factor), sum + i, n);
  });
}

// Sixteen columns at a time, so that their running values stay in registers.
void causal_softmax(float* tile, std::size_t rows, std::size_t first_query, float scale) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    // Rows before `full` are visible to all sixteen queries; column c + l also sees rows up to full + l - 1.
    const std::size_t full = std::min(rows, first_query + c + 1);
    const std::size_t seen = std::min(rows, first_query + c + kLanes);
    for (std::size_t r = full; r < seen; ++r) {
      for (std::size_t l = 0; l < kLanes; ++l) {
        // Out of the maximum's way here; an exact zero below.
        if (r > first_query + c + l) tile[r * kPanel + c + l] = -1e30f;
      }
    }
    Lanes maximum = splat(-1e30f);
    for (std::size_t r = 0; r < seen; ++r) maximum = larger(load(tile + r * kPanel + c), maximum);
    Lanes sum = splat(0);
    for (std::size_t r = 0; r < seen; ++r) {
      float* row = tile + r * kPanel + c;
      store(exponential((load(row) - maximum) * splat(scale)), row);
      if (r >= full) {
        for (std::size_t l = 0; l < kLanes; ++l) {
          if (r > first_query + c + l) row[l] = 0;
        }
      }
      sum = sum + load(row);
    }
    const Lanes inverse = splat(1) / sum;
    for (std::size_t r = 0; r < seen; ++r) store(load(tile + r * kPanel + c) * inverse, tile + r * kPanel + c);
    for (std::size_t r = seen; r < rows; ++r) store(splat(0), tile + r * kPanel + c);
  }
}

void masked_softmax(float* tile, std::size_t rows, std::size_t first_key, std::size_t first_query,
                    const std::uint32_t* lows, float scale) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    // All sixteen queries see rows of [begin, full), some see those of [low, begin) and [full, seen).
    const auto [least, most] = std::minmax_element(lows + c, lows + c + kLanes);
    const std::size_t end = first_query + c + 1 - std::min(first_key, first_query + c + 1);
    const std::size_t full = std::min(rows, end), seen = std::min(rows, end + kLanes - 1);
    const std::size_t low = std::min(*least - std::min<std::size_t>(*least, first_key), seen);
    const std::size_t begin = std::min(*most - std::min<std::size_t>(*most, first_key), seen);
    const auto hides = [&](std::size_t r, std::size_t l) {
      const std::size_t key = first_key + r;
      return key < lows[c + l] || key > first_query + c + l;
    };
    const auto some = [&](std::size_t r) { return r < begin || r >= full; };
    for (std::size_t r = low; r < seen; ++r) {
      for (std::size_t l = 0; l < kLanes && some(r); ++l) {
        if (hides(r, l)) tile[r * kPanel + c + l] = -1e30f;
      }
    }
    Lanes maximum = splat(-1e30f);
    for (std::size_t r = low; r < seen; ++r) maximum = larger(load(tile + r * kPanel + c), maximum);
    Lanes sum = splat(0);
    for (std::size_t r = low; r < seen; ++r) {
      float* row = tile + r * kPanel + c;
      store(exponential((load(row) - maximum) * splat(scale)), row);
      for (std::size_t l = 0; l < kLanes && some(r); ++l) {
        if (hides(r, l)) row[l] = 0;
      }
      sum = sum + load(row);
    }
    const Lanes inverse = splat(1) / sum;
    for (std::size_t r = low; r < seen; ++r) store(load(tile + r * kPanel + c) * inverse, tile + r * kPanel + c);
    for (std::size_t r = 0; r < low; ++r) store(splat(0), tile + r * kPanel + c);
    for (std::size_t r = seen; r < rows; ++r) store(splat(0), tile + r * kPanel + c);
  }
}

void soft_cap(float* tile, std::size_t rows, float scale, float cap, float* slopes) {
  for (std::size_t i = 0; i < rows * kPanel; i += kLanes) {
    const Lanes t = hyperbolic_tangent(load(tile + i) * splat(scale / cap));
    store(splat(cap) * t, tile + i);
    if (slopes != nullptr) store(splat(1) - t * t, slopes + i);
  }
}

void scale_tile(float* tile, const float* slopes, std::size_t rows, float scale) {
  for (std::size_t i = 0; i < rows * kPanel; i += kLanes) {
    store(load(tile + i) * (load(slopes + i) * splat(scale)), tile + i);
  }
}

void softmax_backward(const float* probabilities, float* dprobabilities, std::size_t rows, float scale) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    Lanes dot = splat(0);
    for (std::size_t r = 0; r < rows; ++r) {
      dot = dot + load(probabilities + r * kPanel + c) * load(dprobabilities + r * kPanel + c);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      float* d = dprobabilities + r * kPanel + c;
      store(load(probabilities + r * kPanel + c) * (load(d) - dot) * splat(scale), d);
    }
  }
}

void column_statistics(const float* tile, std::size_t rows, float* maximum, float* sum) {
  for (std::size_t c = 0; c < kPanel; c += kLanes) {
    Lanes m = load(tile + c), s = splat(0);
    for (std::size_t r = 1; r < rows; ++r) m = larger(load(tile + r * kPanel + c), m);
    for (std::size_t r = 0; r < rows; ++r) s = s + exponential(load(tile + r * kPanel + c) - m);
    store(m, maximum + c);
    store(s, sum + c);
  }
}

void column_probabilities(float* tile, std::size_t rows, const float* log_sum, float scale) {
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < kPanel; c += kLanes) {
      float* row = tile + r * kPanel + c;
      store(exponential(load(row) - load(log_sum + c)) * splat(scale), row);
    }
  }
}

// Chains of 64 rows, added in order: the rounding error grows with 64 + rows / 64 instead of rows.
template <typename T>
void column_sums(const void* x, std::size_t stride, std::size_t rows, std::size_t columns, float* sum) {
  for (std::size_t begin = 0; begin < rows; begin += 64) {
    const std::size_t end = std::min(rows, begin + 64);
    for_lanes<T>(columns, [&](auto io, std::size_t i, std::size_t n) {
      using Sum = std::conditional_t<std::is_same_v<decltype(io), Full<T>>, Full<float>, Tail<float>>;
      Lanes chain = splat(0);
      for (std::size_t r = begin; r < end; ++r) chain = chain + io.read(typed<T>(x) + r * stride + i, n);
      Sum::write(Sum::read(sum + i, n) + chain, sum + i, n);
    });
  }
}

template <typename T>
void store_tile(const float* tile, std::size_t rows, std::size_t columns, const void* bias, const void* residual,
                void* out, std::size_t stride) {
  for (std::size_t r = 0; r < rows; ++r) {
    for_lanes<T>(columns, [&](auto io, std::size_t i, std::size_t n) {
      Lanes v = load(tile + r * kPanel + i);  // a tile is always kPanel wide
      if (bias != nullptr) v = v + io.read(typed<T>(bias) + i, n);
      if (residual != nullptr) v = v + io.read(typed<T>(residual) + r * stride + i, n);
      io.write(v, typed<T>(out) + r * stride + i, n);
    });
  }
}

template <typename T>
const VectorKernels* table() {
  using Bits = std::conditional_t<std::is_same_v<T, float>, float, std::uint16_t>;  // of what is moved as it is
  static constexpr VectorKernels kTable = {
      widen<T>,
      narrow<T>,
      add<T>,
      accumulate<T>,
      scale<T>,
      accumulate_scaled<T>,
      layer_norm<T>,
      layer_norm_backward<T>,
      layer_norm_backward_columns<T>,
      rms_norm<T>,
      rms_norm_backward<T>,
      rms_norm_backward_columns<T>,
      rotate<T>,
      gelu<T>,
      gelu_backward<T>,
      {gated<T, Silu>, gated<T, GeluTanh>, gated<T, Gelu>},
      {gated_backward<T, Silu>, gated_backward<T, GeluTanh>, gated_backward<T, Gelu>},
      causal_softmax,
      masked_softmax,
      soft_cap,
      scale_tile,
      softmax_backward,
      column_statistics,
      column_probabilities,
      column_sums<T>,
      store_tile<T>,
      store_transposed<T>,
      transpose<Bits>,
      transpose_widen<T>,
      pack<Bits>,
      pack_transposed<Bits>,
      pack_widen<T>,
      pack_transposed_widen<T>};
  return &kTable;
}

const VectorKernels* find_table(DType type) {
  switch (type) {
    case DType::kBFloat16: return table<std::uint16_t>();
    case DType::kFloat16: return table<Half>();
    case DType::kFloat32: break;
  }
  return table<float>();
}
const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace spillway::models::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway::models {
namespace {
HWY_EXPORT(find_table);
HWY_EXPORT(target_name);
}  // namespace

const VectorKernels& vector_kernels(DType type) { return *HWY_DYNAMIC_DISPATCH(find_table)(type); }

std::vector<VectorTarget> vector_targets(DType type) {
  std::vector<VectorTarget> targets;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    targets.push_back({HWY_DYNAMIC_DISPATCH(target_name)(), HWY_DYNAMIC_DISPATCH(find_table)(type)});
  }
  hwy::SetSupportedTargetsForTest(0);
  return targets;
}

}  // namespace spillway::models
#endif
