// Transposition, and packing of GEMM operands (layouts: panel_gemm.h). Included once per Highway target.
#if defined(SPILLWAY_GPT2_VECTOR_PACKING_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_GPT2_VECTOR_PACKING_H
#undef SPILLWAY_GPT2_VECTOR_PACKING_H
#else
#define SPILLWAY_GPT2_VECTOR_PACKING_H
#endif

#include <algorithm>
#include <type_traits>

#include "tools/models/ops/vector_kernels.h"
#include "tools/models/ops/vector_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace spillway::models::HWY_NAMESPACE {
namespace {

// A 16 x 16 square as compiler vectors: their shuffles lower well on each instruction set, and Highway has no
// full-width interleave.
template <typename T>
struct Square {
  typedef T Row __attribute__((vector_size(16 * sizeof(T))));
  Row row[16];
};

// Two rows, element by element in turn: 32, in two rows.
template <typename Row>
HWY_INLINE void interleave(const Row& a, const Row& b, Row& low, Row& high) {
  low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Transposes in four rounds. Each interleaves row i with row i + 8 element by element into rows 2i and 2i + 1 (a
// perfect shuffle of the 256 elements); after four of them row and column numbers have changed places.
template <typename T>
HWY_INLINE void transpose_square(Square<T>& a) {
  Square<T> b;
  for (int i = 0; i < 8; ++i) interleave(a.row[i], a.row[i + 8], b.row[2 * i], b.row[2 * i + 1]);
  for (int i = 0; i < 8; ++i) interleave(b.row[i], b.row[i + 8], a.row[2 * i], a.row[2 * i + 1]);
  for (int i = 0; i < 8; ++i) interleave(a.row[i], a.row[i + 8], b.row[2 * i], b.row[2 * i + 1]);
  for (int i = 0; i < 8; ++i) interleave(b.row[i], b.row[i + 8], a.row[2 * i], a.row[2 * i + 1]);
}

// out[c][r] = in[r][c], of at most 16 x 16.
template <typename T>
HWY_INLINE void transpose_piece(const T* in, std::size_t in_stride, std::size_t height, std::size_t width, T* out,
                                std::size_t out_stride) {
  Square<T> square = {};
  for (std::size_t i = 0; i < height; ++i) {
    if (width == 16)
      std::memcpy(&square.row[i], in + i * in_stride, 16 * sizeof(T));
    else
      std::memcpy(&square.row[i], in + i * in_stride, width * sizeof(T));
  }
  transpose_square(square);
  for (std::size_t i = 0; i < width; ++i) {
    if (height == 16)
      std::memcpy(out + i * out_stride, &square.row[i], 16 * sizeof(T));
    else
      std::memcpy(out + i * out_stride, &square.row[i], height * sizeof(T));
  }
}

// out[c][r] = in[r][c], 16 x 16 squares; short ones go through zero-padded rows. As many squares one below the other as
// fill cache lines of the result: rows of it are often 4 KiB apart, so that lines do not stay for a second visit.
template <typename T>
void transpose_matrix(const T* in, std::size_t in_stride, std::size_t rows, std::size_t columns, T* out,
                      std::size_t out_stride) {
  constexpr std::size_t kLine = 64 / sizeof(T);
  for (std::size_t block = 0; block < rows; block += kLine) {
    const std::size_t end = std::min(rows, block + kLine);
    for (std::size_t c = 0; c < columns; c += 16) {
      for (std::size_t r = block; r < end; r += 16) {
        transpose_piece(in + r * in_stride + c, in_stride, std::min<std::size_t>(16, end - r),
                        std::min<std::size_t>(16, columns - c), out + c * out_stride + r, out_stride);
      }
    }
  }
}

template <typename T>
void transpose(const void* in, std::size_t in_stride, std::size_t rows, std::size_t columns, void* out,
               std::size_t out_stride) {
  transpose_matrix(static_cast<const T*>(in), in_stride, rows, columns, static_cast<T*>(out), out_stride);
}

// The same with the result in fp32: each strip of 16 rows is widened first.
template <typename T>
void transpose_widen(const void* in, std::size_t in_stride, std::size_t rows, std::size_t columns, float* out,
                     std::size_t out_stride) {
  const T* from = static_cast<const T*>(in);
  float strip[16 * kPanel];
  for (std::size_t r = 0; r < rows; r += 16) {
    const std::size_t height = std::min<std::size_t>(16, rows - r);
    for (std::size_t c = 0; c < columns; c += kPanel) {
      const std::size_t width = std::min(kPanel, columns - c);
      for (std::size_t i = 0; i < height; ++i) {
        for_lanes<T>(width, [&](auto io, std::size_t k, std::size_t n) {
          store(io.read(from + (r + i) * in_stride + c + k, n), strip + i * kPanel + k);
        });
      }
      transpose_matrix(strip, kPanel, height, width, out + c * out_stride + r, out_stride);
    }
  }
}

template <typename T>
void store_transposed(const float* tile, std::size_t rows, std::size_t columns, void* out, std::size_t stride) {
  T* to = static_cast<T*>(out);
  float strip[kPanel * 16];
  for (std::size_t r = 0; r < rows; r += 16) {
    const std::size_t height = std::min<std::size_t>(16, rows - r);
    transpose_matrix(tile + r * kPanel, kPanel, height, columns, strip, 16);
    for (std::size_t c = 0; c < columns; ++c) {
      if (height == kLanes)
        store(load(strip + c * 16), to + c * stride + r);
      else
        Tail<T>::write(load(strip + c * 16), to + c * stride + r, height);
    }
  }
}

// Never inlined: where `columns` is a constant, clang 14 unrolls the copies, and takes 20 GB to merge them.
template <typename T>
HWY_NOINLINE void pack_widen(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, float* panel) {
  const T* from = static_cast<const T*>(x);
  for (std::size_t k = 0; k < depth; ++k) {
    float* row = panel + k * kPanel;
    for_lanes<T>(columns,
                 [&](auto io, std::size_t c, std::size_t n) { store(io.read(from + k * stride + c, n), row + c); });
    for (std::size_t c = (columns + kLanes - 1) / kLanes * kLanes; c < kPanel; ++c) row[c] = 0;
  }
  std::fill(panel + depth * kPanel, panel + padded_depth(depth) * kPanel, 0.0f);
}

template <typename T>
void pack_transposed_widen(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, float* panel) {
  if constexpr (std::is_same_v<T, float>) {
    transpose_matrix(static_cast<const float*>(x), stride, columns, depth, panel, kPanel);
  } else {
    transpose_widen<T>(x, stride, columns, depth, panel, kPanel);
  }
  if (columns < kPanel) {
    for (std::size_t k = 0; k < depth; ++k) std::fill(panel + k * kPanel + columns, panel + (k + 1) * kPanel, 0.0f);
  }
  std::fill(panel + depth * kPanel, panel + padded_depth(depth) * kPanel, 0.0f);
}

// 16 bits: rows k and k + 1 lie interleaved, as the dot-product instructions read them; a pair is one 32-bit word.
template <typename T>
void pack(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, void* panel) {
  if constexpr (std::is_same_v<T, float>) {
    pack_widen<float>(x, stride, depth, columns, static_cast<float*>(panel));
  } else {
    const T* from = static_cast<const T*>(x);
    auto* words = static_cast<std::uint32_t*>(panel);
    const std::size_t padded = padded_depth(depth);
    static constexpr T kZeros[kPanel] = {};
    for (std::size_t k = 0; k < padded; k += 2, words += kPanel) {
      const T* even = k < depth ? from + k * stride : kZeros;
      const T* odd = k + 1 < depth ? from + (k + 1) * stride : kZeros;
      for (std::size_t c = 0; c < columns; ++c) words[c] = even[c] | static_cast<std::uint32_t>(odd[c]) << 16;
      for (std::size_t c = columns; c < kPanel; ++c) words[c] = 0;
    }
  }
}

template <typename T>
void pack_tile(const float* tile, std::size_t rows, void* by_row, void* panel) {
  if (by_row != nullptr) {
    for (std::size_t i = 0; i < rows * kPanel; i += kLanes) store(load(tile + i), typed<T>(by_row) + i);
  }
  if (panel == nullptr) return;
  if constexpr (std::is_same_v<T, std::uint16_t>) {
    auto* words = static_cast<std::uint32_t*>(panel);
    for (std::size_t r = 0; r < rows; r += 2) {
      for (std::size_t c = 0; c < kPanel; c += kLanes) {
        const float* even = tile + r * kPanel + c;
        store_interleaved(load(even), r + 1 < rows ? load(even + kPanel) : splat(0), words + r / 2 * kPanel + c);
      }
    }
    const std::size_t pairs = (rows + 1) / 2, padded = padded_depth(rows) / 2;
    std::fill(words + pairs * kPanel, words + padded * kPanel, 0u);
  } else if constexpr (std::is_same_v<T, float>) {
    pack_widen<float>(tile, kPanel, rows, kPanel, static_cast<float*>(panel));
  }
}

template <typename T>
void pack_transposed(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, void* panel) {
  if constexpr (std::is_same_v<T, float>) {
    pack_transposed_widen<float>(x, stride, depth, columns, static_cast<float*>(panel));
  } else {
    // Pairs of a source row are words already: transpose words, in strips of 16 source rows.
    const T* from = static_cast<const T*>(x);
    auto* words = static_cast<std::uint32_t*>(panel);
    const std::size_t pairs = padded_depth(depth) / 2, whole = depth / 32 * 16;
    for (std::size_t c = 0; c < kPanel; c += 16) {
      for (std::size_t k = 0; k < pairs; k += 16) {
        Square<std::uint32_t> square = {};
        for (std::size_t i = 0; i < 16 && c + i < columns; ++i) {
          const T* row = from + (c + i) * stride + 2 * k;
          if (k < whole)
            std::memcpy(&square.row[i], row, 32 * sizeof(T));
          else
            std::memcpy(&square.row[i], row, (depth - 2 * k) * sizeof(T));
        }
        transpose_square(square);
        for (std::size_t i = 0; i < 16; ++i) std::memcpy(words + (k + i) * kPanel + c, &square.row[i], 64);
      }
    }
  }
}

}  // namespace
}  // namespace spillway::models::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
