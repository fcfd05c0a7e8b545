// Operations on rows that decoders have: RMS norms, of whole rows or of each head, rotary positions, gated activations.
//
// An RMS norm has a warp for each row. Backward's sums over rows go block by block of rows, each thread a column, and
// what the blocks found is added in a second kernel.
#include <algorithm>

#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

constexpr unsigned kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kLanes = 8;  // rows that a block of sums reads at one time
constexpr std::size_t kRowsOfBlock = 256;

unsigned blocks_for(std::size_t count, std::size_t of_block) {
  return static_cast<unsigned>((count + of_block - 1) / of_block);
}

// Where a row of a group begins.
struct Places {
  std::size_t stride;
  std::uint32_t groups, columns;
  __device__ std::size_t of(std::size_t row) const { return row / groups * stride + row % groups * columns; }
};

template <typename T, unsigned N>
__global__ void normalize_rows(const T* x, Places from, const T* weight, T* out, Places to, float* statistics,
                               std::size_t rows, float offset, float epsilon) {
  const std::size_t row = std::size_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32, columns = from.columns;
  if (row >= rows) return;
  const T* const in = x + from.of(row);
  float sum = 0;
  for (unsigned c = lane * N; c < columns; c += 32 * N) {
    float v[N];
    load(in + c, v);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) sum += v[i] * v[i];
  }
  const float rstd = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(columns) + epsilon);
  if (lane == 0) statistics[row] = rstd;
  for (unsigned c = lane * N; c < columns; c += 32 * N) {
    float v[N], w[N];
    load(in + c, v);
    load(weight + c, w);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) v[i] = v[i] * rstd * (w[i] + offset);
    store(v, out + to.of(row) + c);
  }
}

// dx = rstd * (g - n * mean(g * n)) + residual, n = x * rstd, g = dout * (weight + offset)
template <typename T, unsigned N>
__global__ void rows_backward(const T* x, Places at, const T* weight, const T* dout, Places from,
                              const float* statistics, const T* residual, T* dx, Places to, std::size_t rows,
                              float offset) {
  const std::size_t row = std::size_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32, columns = at.columns;
  if (row >= rows) return;
  const T *const in = x + at.of(row), *const d = dout + from.of(row);
  const float rstd = statistics[row];
  float sum = 0;
  for (unsigned c = lane * N; c < columns; c += 32 * N) {
    float v[N], w[N], g[N];
    load(in + c, v);
    load(weight + c, w);
    load(d + c, g);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) sum += g[i] * (w[i] + offset) * (v[i] * rstd);
  }
  const float mean = warp_sum(sum) / static_cast<float>(columns);
  for (unsigned c = lane * N; c < columns; c += 32 * N) {
    float v[N], w[N], g[N], r[N] = {};
    load(in + c, v);
    load(weight + c, w);
    load(d + c, g);
    if (residual != nullptr) load(residual + row * columns + c, r);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) r[i] = rstd * (g[i] * (w[i] + offset) - v[i] * rstd * mean) + r[i];
    store(r, dx + to.of(row) + c);
  }
}

// partial[block][column] = the sum over the block's rows of dout * x * rstd. Threads (32, kLanes).
template <typename T>
__global__ void sum_weight_gradient(const T* x, Places at, const T* dout, Places from, const float* statistics,
                                    std::size_t rows, float* partial) {
  __shared__ float sums[kLanes][32];
  const unsigned c = blockIdx.x * 32 + threadIdx.x, columns = at.columns;
  const std::size_t first = blockIdx.y * kRowsOfBlock, end = min(first + kRowsOfBlock, rows);
  float sum = 0;
  if (c < columns) {
    for (std::size_t r = first + threadIdx.y; r < end; r += kLanes) {
      sum += widen(dout[from.of(r) + c]) * (widen(x[at.of(r) + c]) * statistics[r]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  for (unsigned lane = 1; lane < kLanes; ++lane) sum += sums[lane][threadIdx.x];
  partial[blockIdx.y * std::size_t{columns} + c] = sum;
}

template <typename T>
__global__ void turn(T* x, std::size_t stride, std::uint32_t heads, std::uint32_t head_width, std::uint32_t half,
                     const float2* table, const std::uint32_t* positions, std::uint32_t sequence, std::size_t tokens,
                     float sign) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x, of_token = std::size_t{heads} * half;
  const std::size_t m = index / of_token, i = index % half, head = index % of_token / half;
  if (m >= tokens) return;
  const std::size_t position = positions != nullptr ? positions[m] : m % sequence;
  const float2 angle = table[position * half + i];
  T* const at = x + m * stride + head * head_width + i;
  const float a = widen(at[0]), b = widen(at[half]);
  narrow(a * angle.x - sign * b * angle.y, at[0]);
  narrow(b * angle.x + sign * a * angle.y, at[half]);
}

constexpr float kSlope = 0.7978845608028654f, kCubic = 0.044715f;                 // of gelu with tanh: sqrt(2 / pi)
constexpr float kRootHalf = 0.7071067811865476f, kDensity = 0.3989422804014327f;  // of gelu: sqrt(1/2), 1/sqrt(2 pi)

template <Activation kind>
__device__ float activated(float x) {
  if constexpr (kind == Activation::kSilu) return x / (1.0f + expf(-x));
  if constexpr (kind == Activation::kGeluTanh) return 0.5f * x * (1.0f + tanhf(kSlope * (x + kCubic * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * kRootHalf));
}

template <Activation kind>
__device__ float derivative(float x) {
  if constexpr (kind == Activation::kSilu) {
    const float s = 1.0f / (1.0f + expf(-x));
    return s * (1.0f + x * (1.0f - s));
  } else if constexpr (kind == Activation::kGeluTanh) {
    const float t = tanhf(kSlope * (x + kCubic * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kSlope * (1.0f + 3.0f * kCubic * x * x);
  } else {
    return 0.5f * (1.0f + erff(x * kRootHalf)) + x * kDensity * expf(-0.5f * x * x);
  }
}

template <typename T, unsigned N, Activation kind>
__global__ void gate_forward(const T* gate_up, T* out, std::size_t tokens, std::size_t inner) {
  const std::size_t index = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * N, m = index / inner;
  if (m >= tokens) return;
  const T* const gate = gate_up + m * 2 * inner + index % inner;
  float g[N], u[N];
  load(gate, g);
  load(gate + inner, u);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) g[i] = activated<kind>(g[i]) * u[i];
  store(g, out + index);
}

// Every thread reads what it writes, so dgate_up may be gate_up.
template <typename T, unsigned N, Activation kind>
__global__ void gate_backward(const T* gate_up, const T* dout, T* dgate_up, std::size_t tokens, std::size_t inner) {
  const std::size_t index = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * N, m = index / inner;
  if (m >= tokens) return;
  const std::size_t at = m * 2 * inner + index % inner;
  float g[N], u[N], d[N];
  load(gate_up + at, g);
  load(gate_up + at + inner, u);
  load(dout + index, d);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) {
    const float up = d[i] * activated<kind>(g[i]);
    g[i] = d[i] * u[i] * derivative<kind>(g[i]);
    u[i] = up;
  }
  store(g, dgate_up + at);
  store(u, dgate_up + at + inner);
}

template <typename T, unsigned N>
__global__ void add_tensors(const T* a, const T* b, T* sum, std::size_t count) {
  const std::size_t index = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (index >= count) return;
  float x[N], y[N];
  load(a + index, x);
  load(b + index, y);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) x[i] += y[i];
  store(x, sum + index);
}

template <typename T, unsigned N>
__global__ void scale_tensor(const T* x, T* out, float factor, std::size_t count) {
  const std::size_t index = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (index >= count) return;
  float v[N];
  load(x + index, v);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) v[i] *= factor;
  store(v, out + index);
}

// Calls work.operator()<kind>().
template <typename Work>
cudaError_t for_activation(Activation activation, Work work) {
  switch (activation) {
    case Activation::kSilu: return work.template operator()<Activation::kSilu>();
    case Activation::kGeluTanh: return work.template operator()<Activation::kGeluTanh>();
    case Activation::kGelu: return work.template operator()<Activation::kGelu>();
  }
  return cudaErrorInvalidValue;
}

template <typename T, unsigned N>
__global__ void copy_columns(const T* from, std::size_t from_stride, T* to, std::size_t to_stride, std::size_t columns,
                             std::size_t rows) {
  const std::size_t index = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * N, m = index / columns;
  if (m >= rows) return;
  const std::size_t c = index % columns;
  *reinterpret_cast<Vector<T, N>*>(to + m * to_stride + c) =
      *reinterpret_cast<const Vector<T, N>*>(from + m * from_stride + c);
}

// dweight: the sums of its block of rows, and these together.
cudaError_t rms_weight_gradient(const Shape& shape, const RmsNormBackward& op, float* partial, cudaStream_t stream) {
  const std::size_t rows = tokens_of(shape, op.count) * op.groups;
  const unsigned row_blocks = blocks_for(rows, kRowsOfBlock);
  const cudaError_t result = for_type(shape.type, [&]<typename T>(T) {
    sum_weight_gradient<T><<<dim3(blocks_for(op.columns, 32), row_blocks), dim3(32, kLanes), 0, stream>>>(
        static_cast<const T*>(op.x), Places{op.x_stride, op.groups, op.columns}, static_cast<const T*>(op.dout),
        Places{op.dout_stride, op.groups, op.columns}, op.statistics, rows, partial);
    return cudaGetLastError();
  });
  if (result != cudaSuccess) return result;
  return finish_sums(partial, row_blocks, op.columns, {{op.dweight, op.gradient, op.accumulate}, {}}, 1, stream);
}

}  // namespace

cudaError_t rms_norm(const Shape& shape, const RmsNorm& op, cudaStream_t stream) {
  const std::size_t rows = tokens_of(shape, op.count) * op.groups;
  return for_type(shape.type, [&]<typename T>(T) {
    const auto launch = [&]<unsigned N>() {
      normalize_rows<T, N><<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
          static_cast<const T*>(op.x), Places{op.x_stride, op.groups, op.columns}, static_cast<const T*>(op.weight),
          static_cast<T*>(op.out), Places{op.out_stride, op.groups, op.columns}, op.statistics, rows, op.offset,
          shape.epsilon);
      return cudaGetLastError();
    };
    const bool vectors = all_vectors<T>({op.columns, op.x_stride, op.out_stride}, {op.x, op.weight, op.out});
    return vectors ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

std::size_t rms_norm_backward_scratch_bytes(std::size_t rows, std::size_t columns) {
  return blocks_for(rows, kRowsOfBlock) * columns * sizeof(float);
}

// The sums first: dx may lie over dout.
cudaError_t rms_norm_backward(const Shape& shape, const RmsNormBackward& op, void* scratch, cudaStream_t stream) {
  const std::size_t rows = tokens_of(shape, op.count) * op.groups;
  const Places x{op.x_stride, op.groups, op.columns}, dout{op.dout_stride, op.groups, op.columns};
  if (op.dweight != nullptr) {
    const cudaError_t result = rms_weight_gradient(shape, op, static_cast<float*>(scratch), stream);
    if (result != cudaSuccess) return result;
  }
  return for_type(shape.type, [&]<typename T>(T) {
    const auto launch = [&]<unsigned N>() {
      rows_backward<T, N><<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
          static_cast<const T*>(op.x), x, static_cast<const T*>(op.weight), static_cast<const T*>(op.dout), dout,
          op.statistics, static_cast<const T*>(op.residual), static_cast<T*>(op.dx),
          Places{op.dx_stride, op.groups, op.columns}, rows, op.offset);
      return cudaGetLastError();
    };
    const bool vectors = all_vectors<T>({op.columns, op.x_stride, op.dout_stride, op.dx_stride},
                                        {op.x, op.weight, op.dout, op.residual, op.dx});
    return vectors ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

cudaError_t rotary(const Shape& shape, const Rotary& op, cudaStream_t stream) {
  const std::size_t pairs = tokens_of(shape, op.count) * op.heads * (op.rotated / 2);
  return for_type(shape.type, [&]<typename T>(T) {
    turn<T><<<blocks_for(pairs, kThreads), kThreads, 0, stream>>>(
        static_cast<T*>(op.x), op.stride, op.heads, op.head_width, op.rotated / 2,
        reinterpret_cast<const float2*>(op.table), op.positions, shape.sequence, tokens_of(shape, op.count),
        op.backward ? -1.0f : 1.0f);
    return cudaGetLastError();
  });
}

cudaError_t gated_activation(const Shape& shape, const GatedActivation& op, cudaStream_t stream) {
  const std::size_t count = tokens_of(shape, op.count) * shape.inner;
  return for_type(shape.type, [&]<typename T>(T) {
    return for_activation(op.activation, [&]<Activation kind>() {
      const auto launch = [&]<unsigned N>() {
        gate_forward<T, N, kind><<<blocks_for(count / N, kThreads), kThreads, 0, stream>>>(
            static_cast<const T*>(op.gate_up), static_cast<T*>(op.out), tokens_of(shape, op.count), shape.inner);
        return cudaGetLastError();
      };
      return rows_are_vectors<T>(shape.inner) ? launch.template operator()<kVector<T>>()
                                              : launch.template operator()<1>();
    });
  });
}

cudaError_t gated_activation_backward(const Shape& shape, const GatedActivationBackward& op, cudaStream_t stream) {
  const std::size_t count = tokens_of(shape, op.count) * shape.inner;
  return for_type(shape.type, [&]<typename T>(T) {
    return for_activation(op.activation, [&]<Activation kind>() {
      const auto launch = [&]<unsigned N>() {
        gate_backward<T, N, kind><<<blocks_for(count / N, kThreads), kThreads, 0, stream>>>(
            static_cast<const T*>(op.gate_up), static_cast<const T*>(op.dout), static_cast<T*>(op.dgate_up),
            tokens_of(shape, op.count), shape.inner);
        return cudaGetLastError();
      };
      return rows_are_vectors<T>(shape.inner) ? launch.template operator()<kVector<T>>()
                                              : launch.template operator()<1>();
    });
  });
}

cudaError_t add(const Shape& shape, const Add& op, cudaStream_t stream) {
  const std::size_t count = tokens_of(shape, op.count) * shape.width;
  return for_type(shape.type, [&]<typename T>(T) {
    const auto launch = [&]<unsigned N>() {
      add_tensors<T, N><<<blocks_for(count / N, kThreads), kThreads, 0, stream>>>(
          static_cast<const T*>(op.a), static_cast<const T*>(op.b), static_cast<T*>(op.sum), count);
      return cudaGetLastError();
    };
    return count % kVector<T> == 0 ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

cudaError_t scale(const Shape& shape, const Scale& op, cudaStream_t stream) {
  const std::size_t count = tokens_of(shape, op.count) * op.columns;
  return for_type(shape.type, [&]<typename T>(T) {
    const auto launch = [&]<unsigned N>() {
      scale_tensor<T, N><<<blocks_for(count / N, kThreads), kThreads, 0, stream>>>(
          static_cast<const T*>(op.x), static_cast<T*>(op.out), op.factor, count);
      return cudaGetLastError();
    };
    return count % kVector<T> == 0 ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

cudaError_t copy_rows(const Shape& shape, const CopyRows& op, cudaStream_t stream) {
  const std::size_t rows = tokens_of(shape, op.count), count = rows * op.columns;
  return for_type(shape.type, [&]<typename T>(T) {
    const auto launch = [&]<unsigned N>() {
      copy_columns<T, N><<<blocks_for(count / N, kThreads), kThreads, 0, stream>>>(
          static_cast<const T*>(op.from), op.from_stride, static_cast<T*>(op.to), op.to_stride, op.columns, rows);
      return cudaGetLastError();
    };
    const bool vectors = all_vectors<T>({op.columns, op.from_stride, op.to_stride}, {op.from, op.to});
    return vectors ? launch.template operator()<kVector<T>>() : launch.template operator()<1>();
  });
}

}  // namespace spillway::models
