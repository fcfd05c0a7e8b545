// Rows of the embedding tables, and the sums of gradients that come back to them.
//
// A token may stand at many places, and its row of gradients must be summed in their order. So places of the same token
// are linked first, each to its next one:
//
//   tokens   7  3  7  7  5  3            a warp for each place looks for an equal token before it (then it is not the
//   links    2* 5* 3  ·  ·* ·            first, without *) and after it
//
// and then a block for each first place follows the links.
#include <algorithm>

#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kLoads = 4;  // tokens that a lane looks at in one go
constexpr std::uint32_t kFirst = 0x80000000u;

unsigned columns_blocks(std::size_t width, unsigned vector) {
  return static_cast<unsigned>((width / vector + kThreads - 1) / kThreads);
}

// Row m has position (first + m) % sequence.
struct Positions {
  std::uint32_t first, sequence;
  __device__ std::size_t of(std::size_t m) const { return (first + m) % sequence; }
};

template <typename T, unsigned N>
__global__ void add_rows(const std::uint32_t* tokens, const T* token_weight, const T* position_weight, T* out,
                         Positions positions, std::uint32_t width, float scale) {
  const std::size_t m = blockIdx.x, c = (std::size_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if (c >= width) return;
  float a[N], b[N] = {};
  load(token_weight + std::size_t{tokens[m]} * width + c, a);
  if (position_weight != nullptr) load(position_weight + positions.of(m) * width + c, b);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) a[i] = a[i] * scale + b[i];
  store(a, out + m * width + c);
}

// links[i]: the next place of the same token (m: there is none), with kFirst where there is none before i.
__global__ void link_places(const std::uint32_t* tokens, std::uint32_t m, std::uint32_t* links) {
  const std::uint32_t i = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (i >= m) return;
  const std::uint32_t token = tokens[i];
  bool earlier = false;
  for (std::uint32_t behind = 0; behind < i && !earlier; behind += 32 * kLoads) {
    bool equal = false;
#pragma unroll
    for (unsigned k = 0; k < kLoads; ++k) {
      const std::uint32_t distance = behind + k * 32 + lane + 1;
      equal |= distance <= i && tokens[i - distance] == token;
    }
    earlier = __any_sync(0xffffffffu, equal);
  }
  std::uint32_t next = m;
  for (std::uint32_t base = i + 1; base < m && next == m; base += 32 * kLoads) {
    bool equal[kLoads];
#pragma unroll
    for (unsigned k = 0; k < kLoads; ++k) {
      const std::uint32_t j = base + k * 32 + lane;
      equal[k] = j < m && tokens[j] == token;
    }
#pragma unroll
    for (unsigned k = 0; k < kLoads; ++k) {
      const unsigned found = __ballot_sync(0xffffffffu, equal[k]);
      if (found != 0 && next == m) next = base + k * 32 + __ffs(static_cast<int>(found)) - 1;
    }
  }
  if (lane == 0) links[i] = next | (earlier ? 0 : kFirst);
}

template <typename T, unsigned N>
__global__ void sum_token_rows(const std::uint32_t* tokens, const std::uint32_t* links, std::uint32_t m, const T* dout,
                               float* dtoken_weight, std::uint32_t width, float scale) {
  std::uint32_t place = blockIdx.x, link = links[place];
  const std::size_t c = (std::size_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if ((link & kFirst) == 0 || c >= width) return;
  float* to = dtoken_weight + std::size_t{tokens[place]} * width + c;
  float sum[N], row[N];
  load(to, sum);
  while (true) {
    load(dout + std::size_t{place} * width + c, row);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) sum[i] += row[i] * scale;
    place = link & ~kFirst;
    if (place >= m) break;
    link = links[place];
  }
  store(sum, to);
}

// A block for each of the first rows, of different positions; what follows `sequence` rows later has the same one.
template <typename T, unsigned N>
__global__ void sum_position_rows(const T* dout, float* dposition_weight, std::size_t tokens, Positions positions,
                                  std::uint32_t width) {
  const std::size_t c = (std::size_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if (c >= width) return;
  float* const to = dposition_weight + positions.of(blockIdx.x) * width + c;
  float sum[N], row[N];
  load(to, sum);
  for (std::size_t m = blockIdx.x; m < tokens; m += positions.sequence) {
    load(dout + m * width + c, row);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) sum[i] += row[i];
  }
  store(sum, to);
}

template <typename T, unsigned N>
cudaError_t launch_forward(const Shape& shape, const Embedding& op, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(tokens_of(shape, op.count)), columns_blocks(shape.width, N));
  add_rows<T, N><<<grid, kThreads, 0, stream>>>(op.tokens, static_cast<const T*>(op.token_weight),
                                                static_cast<const T*>(op.position_weight), static_cast<T*>(op.out),
                                                Positions{op.first, shape.sequence}, shape.width, op.scale);
  return cudaGetLastError();
}

template <typename T, unsigned N>
cudaError_t launch_backward(const Shape& shape, const EmbeddingBackward& op, std::uint32_t* links,
                            cudaStream_t stream) {
  const auto m = static_cast<std::uint32_t>(tokens_of(shape, op.count));
  const auto* dout = static_cast<const T*>(op.dout);
  const unsigned warps = kThreads / 32, columns = columns_blocks(shape.width, N);
  link_places<<<(m + warps - 1) / warps, kThreads, 0, stream>>>(op.tokens, m, links);
  if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess) return result;
  sum_token_rows<T, N>
      <<<dim3(m, columns), kThreads, 0, stream>>>(op.tokens, links, m, dout, op.dtoken_weight, shape.width, op.scale);
  if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess || op.dposition_weight == nullptr) {
    return result;
  }
  sum_position_rows<T, N><<<dim3(std::min(m, shape.sequence), columns), kThreads, 0, stream>>>(
      dout, op.dposition_weight, m, Positions{op.first, shape.sequence}, shape.width);
  return cudaGetLastError();
}

}  // namespace

cudaError_t embedding(const Shape& shape, const Embedding& op, cudaStream_t stream) {
  return for_type(shape.type, [&]<typename T>(T) {
    return rows_are_vectors<T>(shape.width) ? launch_forward<T, kVector<T>>(shape, op, stream)
                                            : launch_forward<T, 1>(shape, op, stream);
  });
}

std::size_t embedding_backward_scratch_bytes(const Shape& shape) {
  return shape.slice_tokens() * sizeof(std::uint32_t);
}

cudaError_t embedding_backward(const Shape& shape, const EmbeddingBackward& op, void* scratch, cudaStream_t stream) {
  auto* links = static_cast<std::uint32_t*>(scratch);
  return for_type(shape.type, [&]<typename T>(T) {
    return rows_are_vectors<T>(shape.width) ? launch_backward<T, kVector<T>>(shape, op, links, stream)
                                            : launch_backward<T, 1>(shape, op, links, stream);
  });
}

}  // namespace spillway::models
