// Tiles of 16-bit tensors in shared memory, and products of 16x16 pieces of them in tensor cores.
//
// A tile has kWidth columns: the head width rounded up, zeros past its end. A row is kWidth / 8 chunks of 16 bytes; in
// memory the chunks of a row are permuted, so that the eight rows that ldmatrix reads at one chunk lie in eight
// different groups of four banks:
//
//   width 64, 128    row r keeps chunk c at c ^ (r % 8)        a row starts at bank 0
//   width 96         row r keeps chunk c at c ^ (r / 2 % 4)    odd rows (192 bytes each) start at bank 16
#pragma once

#include <cstdint>

#include "tools/models/ops/cuda/attention_launch.cuh"
#include "tools/models/ops/cuda/attention_ptx.cuh"

namespace spillway::models::attention {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kLog2E = 1.44269504f;

template <int kWidth>
inline constexpr int kRowBytes = 2 * kWidth;

template <int kWidth>
__device__ __forceinline__ int swizzle(int row) {
  static_assert(kWidth == 64 || kWidth == 96 || kWidth == 128);
  return kWidth == 96 ? row / 2 % 4 : row % 8;
}

// Bytes from the start of a tile.
template <int kWidth>
__device__ __forceinline__ int offset_of(int row, int chunk) {
  return row * kRowBytes<kWidth> + (chunk ^ swizzle<kWidth>(row)) * 16;
}

// Where a lane points ldmatrix for 16x16 pieces of a tile: piece (r, c) is rows 16 r ..., columns 16 c ... The order of
// its four 8x8 matrices is that of the operand's registers.
template <int kWidth>
class Pieces {
 public:
  // Upper left, lower left, upper right, lower right: a[0..3] as stored; transposed: b0, b1 of the left 8 columns and
  // b0, b1 of the right ones.
  __device__ __forceinline__ static Pieces by_columns(std::uint32_t tile, int first_row) {
    const int lane = threadIdx.x % 32;
    return Pieces(tile, first_row + lane % 16, lane / 16);
  }
  // Upper left, upper right, lower left, lower right: b0, b1 of the upper 8 rows and b0, b1 of the lower ones, where a
  // row of the tile is a column of b.
  __device__ __forceinline__ static Pieces by_rows(std::uint32_t tile, int first_row) {
    const int lane = threadIdx.x % 32;
    return Pieces(tile, first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // 16 rows further the permutation is the same; and (2 c + half) ^ s = 2 c ^ (half ^ s), as half is the lowest bit.
  __device__ __forceinline__ std::uint32_t at(int r, int c) const {
    return row_ + r * 16 * kRowBytes<kWidth> + ((2 * c) ^ chunk_) * 16;
  }

 private:
  __device__ __forceinline__ Pieces(std::uint32_t tile, int row, int half)
      : row_(tile + row * kRowBytes<kWidth>), chunk_(half ^ swizzle<kWidth>(row)) {}
  std::uint32_t row_;
  int chunk_;
};

// Begins to copy rows [first, first + kRows) of a tensor [end][head_width], `stride` elements from row to row. A thread
// copies the same chunks of rows that are a multiple of 8 apart, which are permuted alike.
template <int kWidth, int kRows, typename Element>
__device__ __forceinline__ void begin_load(std::uint32_t tile, const Element* from, std::int64_t stride, int first,
                                           int end, const Problem& problem) {
  // Of a row, that lanes next to each other copy: all, or at width 96 a third, the lower two bits of chunk numbers.
  constexpr int kChunks = kWidth == 96 ? 4 : kWidth / 8;
  constexpr int kPassRows = kThreads / kChunks;
  static_assert(kRows % kPassRows == 0 && kPassRows % 8 == 0);
  const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const Element* source = from + (first + row) * stride + chunk * 8;
  const std::uint32_t to = tile + offset_of<kWidth>(row, chunk);
#pragma unroll
  for (int pass = 0; pass < kRows / kPassRows; ++pass) {
#pragma unroll
    for (int part = 0; part < kWidth / 8 / kChunks; ++part) {
      const bool valid = first + row + pass * kPassRows < end && (chunk + part * kChunks) * 8 < problem.head_width;
      copy_16_bytes(to + pass * kPassRows * kRowBytes<kWidth> + part * kChunks * 16,
                    source + pass * kPassRows * stride + part * kChunks * 8, valid);
    }
  }
}

// Stores kRows rows of a warp from `tile` (at its first row, a multiple of 8), which are rows `first` and on of some,
// of which a tensor has those of [begin, end).
template <int kWidth, int kRows, typename Element>
__device__ __forceinline__ void store_rows(const unsigned char* tile, Element* to, std::int64_t stride, int first,
                                           int begin, int end, const Problem& problem) {
  constexpr int kChunks = kWidth / 8;
  static_assert(kRows * kChunks % 32 == 0);
#pragma unroll
  for (int pass = 0; pass < kRows * kChunks / 32; ++pass) {
    const int index = pass * 32 + threadIdx.x % 32, row = index / kChunks, chunk = index % kChunks;
    if (first + row >= begin && first + row < end && chunk * 8 < problem.head_width) {
      *reinterpret_cast<uint4*>(to + (first + row - begin) * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + offset_of<kWidth>(row, chunk));
    }
  }
}

// Two elements in a register, `low` in the lower half; each rounded to nearest.
template <typename Element>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ float2 unpack(std::uint32_t bits, __nv_bfloat16) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(std::uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// Accumulators of kRowTiles x 16 rows and 8 kTiles columns, as multiply_add() lays them out.
template <int kRowTiles, int kTiles>
using Accumulators = float[kRowTiles][kTiles][4];

// Operand a, 16 rows x 16 columns, from the accumulators of columns 16 k ...: the layouts agree.
template <typename Element, int kTiles>
__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[4], const float (&c)[kTiles][4], int k) {
  a[0] = pack<Element>(c[2 * k][0], c[2 * k][1]);
  a[1] = pack<Element>(c[2 * k][2], c[2 * k][3]);
  a[2] = pack<Element>(c[2 * k + 1][0], c[2 * k + 1][1]);
  a[3] = pack<Element>(c[2 * k + 1][2], c[2 * k + 1][3]);
}

// A warp's kRowTiles x 16 rows as operand a, from shared memory each time, or kept in registers.
template <int kWidth, int kRowTiles, bool kInRegisters>
class Rows {
 public:
  __device__ __forceinline__ explicit Rows(Pieces<kWidth> pieces) : pieces_(pieces) {}
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void read(std::uint32_t (&a)[4], int tile, int k) const {
    load_matrices(a, pieces_.at(tile, k));
  }

 private:
  Pieces<kWidth> pieces_;
};

template <int kWidth, int kRowTiles>
class Rows<kWidth, kRowTiles, true> {
 public:
  __device__ __forceinline__ explicit Rows(Pieces<kWidth> pieces) : pieces_(pieces) {}
  // Once the tile is there.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k) load_matrices(kept_[tile][k], pieces_.at(tile, k));
    }
  }
  __device__ __forceinline__ void read(std::uint32_t (&a)[4], int tile, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = kept_[tile][k][i];
  }

 private:
  Pieces<kWidth> pieces_;
  std::uint32_t kept_[kRowTiles][kWidth / 16][4];
};

template <int kRowTiles, int kTiles>
__device__ __forceinline__ void clear(Accumulators<kRowTiles, kTiles>& c) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][n][e] = 0;
    }
  }
}

// c[row][column] = sum over the width of rows[row] · columns[column]. `columns`: by_rows().
template <typename Element, int kWidth, int kRowTiles, int kTiles, bool kInRegisters>
__device__ __forceinline__ void dot_rows(Accumulators<kRowTiles, kTiles>& c,
                                         const Rows<kWidth, kRowTiles, kInRegisters>& rows,
                                         const Pieces<kWidth>& columns, int first_piece) {
  clear<kRowTiles, kTiles>(c);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    std::uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) rows.read(a[i], i, k);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      std::uint32_t b[4];
      load_matrices(b, columns.at(first_piece + n, k));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<Element>(c[i][2 * n], a[i], b[0], b[1]);
        multiply_add<Element>(c[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// sum[row][d] += sum over k of weights[row][k] · values[k][d], weights rounded to Element. `values`: by_columns().
template <typename Element, int kWidth, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_weighted(Accumulators<kRowTiles, kWidth / 8>& sum,
                                             const Accumulators<kRowTiles, kTiles>& weights,
                                             const Pieces<kWidth>& values, int first_piece) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
    std::uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) pack_operand<Element, kTiles>(a[i], weights[i], k);
#pragma unroll
    for (int d = 0; d < kWidth / 16; ++d) {
      std::uint32_t b[4];
      load_matrices_transposed(b, values.at(first_piece + k, d));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<Element>(sum[i][2 * d], a[i], b[0], b[1]);
        multiply_add<Element>(sum[i][2 * d + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Writes a warp's sums, times a factor for each row (of m-tile i, 8 rows further: factors[i][1]), into its rows of a
// tile whose first is a multiple of 8.
template <typename Element, int kWidth, int kRowTiles>
__device__ __forceinline__ void write_rows(unsigned char* tile, const Accumulators<kRowTiles, kWidth / 8>& sum,
                                           const float (&factors)[kRowTiles][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        *reinterpret_cast<std::uint32_t*>(tile + offset_of<kWidth>(row, n) + lane % 4 * 4) =
            pack<Element>(sum[i][n][2 * half] * factors[i][half], sum[i][n][2 * half + 1] * factors[i][half]);
      }
    }
  }
}

}  // namespace spillway::models::attention
