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

// What is hidden: out of a maximum's way, and told from scores by being below any.
constexpr float kHidden = -3e38f, kLeast = -1e30f;

void hide(float* tile, std::size_t rows, std::size_t first_key, std::size_t first_query, const std::uint32_t* lows) {
  const U32 u;
  for (std::size_t c = 0; c < kPanel; c += kPart) {
    const auto query = hn::Iota(u, static_cast<std::uint32_t>(first_query + c));
    const auto low = lows == nullptr ? hn::Zero(u) : hn::LoadU(u, lows + c);
    for (std::size_t r = 0; r < rows; ++r) {
      const auto key = hn::Set(u, static_cast<std::uint32_t>(first_key + r));
      const auto hidden = hn::RebindMask(F32(), hn::Or(hn::Gt(key, query), hn::Lt(key, low)));
      float* at = tile + r * kPanel + c;
      hn::StoreU(hn::IfThenElse(hidden, hn::Set(F32(), kHidden), hn::LoadU(F32(), at)), F32(), at);
    }
  }
}

// Some columns at a time, whose running values stay in registers: four vectors of them, for one alone would wait for
// its own last result.
constexpr std::size_t kWide = 4;
using WideVectors = hn::Vec<F32>[kWide];
HWY_INLINE void load_wide(const float* p, WideVectors& v) {
  for (std::size_t i = 0; i < kWide; ++i) v[i] = hn::LoadU(F32(), p + i * kPart);
}
HWY_INLINE void store_wide(const WideVectors& v, float* p) {
  for (std::size_t i = 0; i < kWide; ++i) hn::StoreU(v[i], F32(), p + i * kPart);
}

void column_maximum(const float* tile, std::size_t rows, float* maximum) {
  for (std::size_t c = 0; c < kPanel; c += kWide * kPart) {
    WideVectors m, x;
    load_wide(maximum + c, m);
    for (std::size_t r = 0; r < rows; ++r) {
      load_wide(tile + r * kPanel + c, x);
      for (std::size_t i = 0; i < kWide; ++i) m[i] = hn::IfThenElse(hn::Gt(x[i], m[i]), x[i], m[i]);
    }
    store_wide(m, maximum + c);
  }
}

void column_exponentials(float* tile, std::size_t rows, const float* maximum, float scale, float* sum) {
  const auto factor = hn::Set(F32(), scale), least = hn::Set(F32(), kLeast);
  for (std::size_t c = 0; c < kPanel; c += kWide * kPart) {
    WideVectors m, s, x, e;
    load_wide(maximum + c, m);
    load_wide(sum + c, s);
    for (std::size_t r = 0; r < rows; ++r) {
      load_wide(tile + r * kPanel + c, x);
      for (std::size_t i = 0; i < kWide; ++i) e[i] = hn::Mul(hn::Sub(x[i], m[i]), factor);
      exponentials(e);
      for (std::size_t i = 0; i < kWide; ++i) {
        e[i] = hn::IfThenZeroElse(hn::Lt(x[i], least), e[i]);
        s[i] = hn::Add(s[i], e[i]);
      }
      store_wide(e, tile + r * kPanel + c);
    }
    store_wide(s, sum + c);
  }
}

void column_dots(const float* probabilities, const float* dprobabilities, std::size_t rows, float* dots) {
  for (std::size_t c = 0; c < kPanel; c += kWide * kPart) {
    WideVectors dot, p, d;
    load_wide(dots + c, dot);
    for (std::size_t r = 0; r < rows; ++r) {
      load_wide(probabilities + r * kPanel + c, p);
      load_wide(dprobabilities + r * kPanel + c, d);
      for (std::size_t i = 0; i < kWide; ++i) dot[i] = hn::Add(dot[i], hn::Mul(p[i], d[i]));
    }
    store_wide(dot, dots + c);
  }
}

void softmax_gradient(const float* probabilities, float* dprobabilities, std::size_t rows, const float* dot,
                      float scale) {
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < kPanel; c += kLanes) {
      float* d = dprobabilities + r * kPanel + c;
      store(load(probabilities + r * kPanel + c) * (load(d) - load(dot + c)) * splat(scale), d);
    }
  }
}

void scale_columns(float* tile, std::size_t rows, const float* factor) {
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < kPanel; c += kLanes) {
      store(load(tile + r * kPanel + c) * load(factor + c), tile + r * kPanel + c);
    }
  }
}

void soft_cap(float* tile, std::size_t rows, float scale, float cap, float* slopes) {
  for (std::size_t i = 0; i < rows * kPanel; i += kLanes) {
    const Lanes t = hyperbolic_tangent(load(tile + i) * splat(scale / cap));
    store(splat(cap) * t, tile + i);
    if (slopes != nullptr) store(splat(1) - t * t, slopes + i);
  }
}

void soft_cap_slopes(const float* tile, std::size_t rows, float cap, float* slopes) {
  for (std::size_t i = 0; i < rows * kPanel; i += kLanes) {
    const Lanes t = load(tile + i) / splat(cap);
    store(splat(1) - t * t, slopes + i);
  }
}

void scale_tile(float* tile, const float* slopes, std::size_t rows, float scale) {
  for (std::size_t i = 0; i < rows * kPanel; i += kLanes) {
    store(load(tile + i) * (load(slopes + i) * splat(scale)), tile + i);
  }
}

void column_statistics(const float* tile, std::size_t rows, float* maximum, float* sum) {
  std::copy_n(tile, kPanel, maximum);
  column_maximum(tile + kPanel, rows - 1, maximum);
  for (std::size_t c = 0; c < kPanel; c += kWide * kPart) {
    WideVectors m, s, x;
    load_wide(maximum + c, m);
    for (auto& v : s) v = hn::Zero(F32());
    for (std::size_t r = 0; r < rows; ++r) {
      load_wide(tile + r * kPanel + c, x);
      for (std::size_t i = 0; i < kWide; ++i) x[i] = hn::Sub(x[i], m[i]);
      exponentials(x);
      for (std::size_t i = 0; i < kWide; ++i) s[i] = hn::Add(s[i], x[i]);
    }
    store_wide(s, sum + c);
  }
}

void column_probabilities(float* tile, std::size_t rows, const float* log_sum, float scale) {
  const auto factor = hn::Set(F32(), scale);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < kPanel; c += kWide * kPart) {
      WideVectors x, logs;
      load_wide(tile + r * kPanel + c, x);
      load_wide(log_sum + c, logs);
      for (std::size_t i = 0; i < kWide; ++i) x[i] = hn::Sub(x[i], logs[i]);
      exponentials(x);
      for (auto& v : x) v = hn::Mul(v, factor);
      store_wide(x, tile + r * kPanel + c);
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
      hide,
      column_maximum,
      column_exponentials,
      column_dots,
      softmax_gradient,
      scale_columns,
      soft_cap,
      soft_cap_slopes,
      scale_tile,
      column_statistics,
      column_probabilities,
      column_sums<T>,
      store_tile<T>,
      store_transposed<T>,
      pack_tile<T>,
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
