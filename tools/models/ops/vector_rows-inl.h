// Rows: norms, rotary positions, activations. Included once per Highway target.
#if defined(SPILLWAY_MODELS_VECTOR_ROWS_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_MODELS_VECTOR_ROWS_H
#undef SPILLWAY_MODELS_VECTOR_ROWS_H
#else
#define SPILLWAY_MODELS_VECTOR_ROWS_H
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "tools/models/ops/vector_kernels.h"
#include "tools/models/ops/vector_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::models::HWY_NAMESPACE {
namespace {

template <typename T>
LayerNormStatistics layer_norm(const void* x, const void* weight, const void* bias, void* y, std::size_t count,
                               float epsilon) {
  Lanes sum = splat(0);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) { sum = sum + io.read(typed<T>(x) + i, n); });
  const float mean = fold(sum) / static_cast<float>(count);
  Lanes squares = splat(0);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    Lanes v = io.read(typed<T>(x) + i, n) - splat(mean);
    if (n < kLanes) {  // the padding is not at zero distance from the mean
      float lanes[kLanes] = {};
      Tail<float>::write(v, lanes, n);
      v = load(lanes);
    }
    squares = squares + v * v;
  });
  const float rstd = 1.0f / std::sqrt(fold(squares) / static_cast<float>(count) + epsilon);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes normalized = (io.read(typed<T>(x) + i, n) - splat(mean)) * splat(rstd);
    io.write(normalized * io.read(typed<T>(weight) + i, n) + io.read(typed<T>(bias) + i, n), typed<T>(y) + i, n);
  });
  return {mean, rstd};
}

// With n = (x - mean) * rstd and g = dy * weight:  dx = rstd * (g - mean(g) - n * mean(g * n)).
template <typename T>
void layer_norm_backward(const void* x, const void* weight, const void* dy, const void* residual, void* dx,
                         std::size_t count, LayerNormStatistics statistics) {
  const Lanes mean = splat(statistics.mean), rstd = splat(statistics.rstd);
  Lanes sum = splat(0), product = splat(0);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes g = io.read(typed<T>(dy) + i, n) * io.read(typed<T>(weight) + i, n);  // zero in the padding
    sum = sum + g;
    product = product + g * ((io.read(typed<T>(x) + i, n) - mean) * rstd);
  });
  const Lanes mean_g = splat(fold(sum) / static_cast<float>(count));
  const Lanes mean_gn = splat(fold(product) / static_cast<float>(count));
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes g = io.read(typed<T>(dy) + i, n) * io.read(typed<T>(weight) + i, n);
    const Lanes normalized = (io.read(typed<T>(x) + i, n) - mean) * rstd;
    Lanes d = (g - mean_g - normalized * mean_gn) * rstd;
    if (residual != nullptr) d = d + io.read(typed<T>(residual) + i, n);
    io.write(d, typed<T>(dx) + i, n);
  });
}

template <typename T>
void layer_norm_backward_columns(const void* x, const void* dy, std::size_t stride, std::size_t rows,
                                 std::size_t columns, const LayerNormStatistics* statistics, float* dweight,
                                 float* dbias) {
  for (std::size_t r = 0; r < rows; ++r) {
    const Lanes mean = splat(statistics[r].mean), rstd = splat(statistics[r].rstd);
    for_lanes<T>(columns, [&](auto io, std::size_t i, std::size_t n) {
      using Sum = std::conditional_t<std::is_same_v<decltype(io), Full<T>>, Full<float>, Tail<float>>;
      const Lanes d = io.read(typed<T>(dy) + r * stride + i, n);
      const Lanes normalized = (io.read(typed<T>(x) + r * stride + i, n) - mean) * rstd;
      Sum::write(Sum::read(dweight + i, n) + d * normalized, dweight + i, n);
      Sum::write(Sum::read(dbias + i, n) + d, dbias + i, n);
    });
  }
}

template <typename T>
float rms_norm(const void* x, const void* weight, float offset, void* y, std::size_t count, float epsilon) {
  Lanes squares = splat(0);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes v = io.read(typed<T>(x) + i, n);
    squares = squares + v * v;
  });
  const float rstd = 1.0f / std::sqrt(fold(squares) / static_cast<float>(count) + epsilon);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes normalized = io.read(typed<T>(x) + i, n) * splat(rstd);
    io.write(normalized * (io.read(typed<T>(weight) + i, n) + splat(offset)), typed<T>(y) + i, n);
  });
  return rstd;
}

// With n = x * rstd and g = dy * (weight + offset):  dx = rstd * (g - n * mean(g * n)).
template <typename T>
void rms_norm_backward(const void* x, const void* weight, float offset, const void* dy, const void* residual, void* dx,
                       std::size_t count, float rstd) {
  const auto gradient = [&](auto io, std::size_t i, std::size_t n) {  // zero in the padding
    return io.read(typed<T>(dy) + i, n) * (io.read(typed<T>(weight) + i, n) + splat(offset));
  };
  Lanes product = splat(0);
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    product = product + gradient(io, i, n) * (io.read(typed<T>(x) + i, n) * splat(rstd));
  });
  const Lanes mean = splat(fold(product) / static_cast<float>(count));
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes normalized = io.read(typed<T>(x) + i, n) * splat(rstd);
    Lanes d = (gradient(io, i, n) - normalized * mean) * splat(rstd);
    if (residual != nullptr) d = d + io.read(typed<T>(residual) + i, n);
    io.write(d, typed<T>(dx) + i, n);
  });
}

// In chains of 64 rows, as column_sums: there are as many rows as tokens times heads.
template <typename T>
void rms_norm_backward_columns(const RowsOf& x, const RowsOf& dy, std::size_t rows, std::size_t columns,
                               const float* statistics, std::size_t statistics_stride, float* dweight) {
  for (std::size_t begin = 0; begin < rows; begin += 64) {
    const std::size_t end = std::min(rows, begin + 64);
    for_lanes<T>(columns, [&](auto io, std::size_t i, std::size_t n) {
      using Sum = std::conditional_t<std::is_same_v<decltype(io), Full<T>>, Full<float>, Tail<float>>;
      Lanes chain = splat(0);
      for (std::size_t r = begin; r < end; ++r) {
        const Lanes normalized =
            io.read(typed<T>(x.first) + r * x.stride + i, n) * splat(statistics[r * statistics_stride]);
        chain = chain + io.read(typed<T>(dy.first) + r * dy.stride + i, n) * normalized;
      }
      Sum::write(Sum::read(dweight + i, n) + chain, dweight + i, n);
    });
  }
}

template <typename T>
void rotate(void* x, const float* angles, std::size_t half, bool backward) {
  const Lanes sign = splat(backward ? -1.0f : 1.0f);
  for_lanes<T>(half, [&](auto io, std::size_t i, std::size_t n) {
    Lanes cosine, sine;
    if (n == kLanes) {
      load_pairs(angles + 2 * i, cosine, sine);
    } else {
      float padded[2 * kLanes] = {};
      std::memcpy(padded, angles + 2 * i, 2 * n * sizeof(float));
      load_pairs(padded, cosine, sine);
    }
    sine = sine * sign;
    T *first = typed<T>(x) + i, *second = first + half;
    const Lanes a = io.read(first, n), b = io.read(second, n);
    io.write(a * cosine - b * sine, first, n);
    io.write(b * cosine + a * sine, second, n);
  });
}

struct Activated {
  Lanes value, slope;
};

// x * sigmoid(x)
struct Silu {
  static HWY_INLINE Activated of(const Lanes& x) {
    const Lanes e = exponential(splat(0) - x), s = splat(1) / (splat(1) + e);
    return {x * s, s * (splat(1) + x * (e * s))};  // e * s = 1 - s, but exact where s is nearly 1
  }
};

// gelu_new(x) = x/2 (1 + tanh u) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)   (Hendrycks & Gimpel 2016)
struct GeluTanh {
  static HWY_INLINE Activated of(const Lanes& x) {
    constexpr float kScale = 1.5957691216f;  // 2 sqrt(2/pi)
    constexpr float kCubic = 0.044715f;
    const Lanes u2 = splat(kScale) * (x + splat(kCubic) * (x * x * x));
    const Lanes s = splat(1) / (splat(1) + exponential(splat(0) - u2));
    const Lanes du2 = splat(kScale) * (splat(1) + splat(3 * kCubic) * (x * x));
    return {x * s, s + x * s * (splat(1) - s) * du2};
  }
};

// x * Phi(x), with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2.
//
// Phi(-t) = e^(-t^2/2) u P(u) with u = 1 / (1 + 0.33 t), the form of Hastings (1955), holds for every t >= 0. P was
// interpolated at the ten Chebyshev points of u for 0 <= t <= 14, off by at most 3e-8 of Phi. With fp32's roundings
// Phi is within 2e-7 and gelu within 2e-7.
struct Gelu {
  static HWY_INLINE Activated of(const Lanes& x) {
    constexpr float kDensity = 0.3989422804f;  // 1 / sqrt(2 pi)
    const Lanes u = splat(1) / (splat(1) + splat(0.33f) * larger(x, splat(0) - x));
    Lanes p = splat(-0.0081968382f);
    for (const float c : {0.020868551f, 0.0319846272f, -0.155157119f, 0.139453441f, -0.0151235359f, 0.10898567f,
                          0.113506906f, 0.132044569f, 0.131633729f}) {
      p = p * u + splat(c);
    }
    const Lanes e = exponential(splat(-0.5f) * (x * x)), tail = e * (u * p);
    const Lanes phi = negative_chooses(x, tail, splat(1) - tail);
    return {x * phi, phi + x * (splat(kDensity) * e)};
  }
};

template <typename T>
void gelu(const void* x, void* y, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    io.write(GeluTanh::of(io.read(typed<T>(x) + i, n)).value, typed<T>(y) + i, n);
  });
}

template <typename T>
void gelu_backward(const void* x, const void* dy, void* dx, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes slope = GeluTanh::of(io.read(typed<T>(x) + i, n)).slope;
    io.write(io.read(typed<T>(dy) + i, n) * slope, typed<T>(dx) + i, n);
  });
}

template <typename T, typename Activation>
void gated(const void* gate, const void* up, void* out, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Lanes activated = Activation::of(io.read(typed<T>(gate) + i, n)).value;
    io.write(activated * io.read(typed<T>(up) + i, n), typed<T>(out) + i, n);
  });
}

template <typename T, typename Activation>
void gated_backward(const void* gate, const void* up, const void* dout, void* dgate, void* dup, std::size_t count) {
  for_lanes<T>(count, [&](auto io, std::size_t i, std::size_t n) {
    const Activated activated = Activation::of(io.read(typed<T>(gate) + i, n));
    const Lanes u = io.read(typed<T>(up) + i, n), d = io.read(typed<T>(dout) + i, n);
    io.write(d * u * activated.slope, typed<T>(dgate) + i, n);
    io.write(d * activated.value, typed<T>(dup) + i, n);
  });
}

}  // namespace
}  // namespace spillway::models::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
