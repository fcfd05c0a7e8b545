// Updates of tiles whose moments are bf16 or int8, with the bits of kernels/moments.h: four elements a thread, so that
// eight neighbouring threads have a group of int8 moments and find its scale among themselves.
#include "kernels/cuda/following.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/optimizer.cuh"
#include "kernels/moments.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kReducedThreads = 256, kFour = 4;
static_assert(kMomentGroup == 8 * kFour);

// The moments of four consecutive elements, decoded.
struct Moments {
  float m[kFour], v[kFour];
};

template <MomentFormat kFormat>
struct Stored;  // how they lie in memory

template <>
struct Stored<MomentFormat::kBFloat16> {
  template <bool kSquare>
  static __device__ Moments load(const ReducedMoments& from, std::size_t i, unsigned there, bool whole) {
    const auto m = load_part<kFour>(static_cast<const std::uint16_t*>(from.exp_avg) + i, there, whole);
    Pack<std::uint16_t, kFour> v{};
    if constexpr (kSquare) v = load_part<kFour>(static_cast<const std::uint16_t*>(from.exp_avg_sq) + i, there, whole);
    Moments moments;
#pragma unroll
    for (unsigned k = 0; k < kFour; ++k) moments.m[k] = bf16_to_float(m.at[k]), moments.v[k] = bf16_to_float(v.at[k]);
    return moments;
  }
  template <bool kSquare>
  static __device__ void store(const ReducedMoments& to, const Moments& moments, std::uint64_t key, std::size_t i,
                               unsigned there, bool whole) {
    Pack<std::uint16_t, kFour> m{}, v{};
#pragma unroll
    for (unsigned k = 0; k < kFour; ++k) {
      const std::uint32_t random = rounding_bits(key, to.index + i + k);
      m.at[k] = moment_to_bf16(moments.m[k], random_of_exp_avg(random));
      v.at[k] = moment_to_bf16(moments.v[k], random_of_exp_avg_sq(random));
    }
    store_part(static_cast<std::uint16_t*>(to.exp_avg) + i, m, there, whole);
    if constexpr (kSquare) store_part(static_cast<std::uint16_t*>(to.exp_avg_sq) + i, v, there, whole);
  }
};

// The scale for the largest of the group's magnitudes, of which this thread's is given; all threads of a warp call it.
__device__ inline std::uint16_t group_scale(std::uint32_t largest) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
    largest = other > largest ? other : largest;
  }
  return scale_to_bf16(__uint_as_float(largest));
}

template <>
struct Stored<MomentFormat::kInt8> {
  template <bool kSquare>
  static __device__ Moments load(const ReducedMoments& from, std::size_t i, unsigned there, bool whole) {
    const auto m = load_part<kFour>(static_cast<const std::int8_t*>(from.exp_avg) + i, there, whole);
    const float scale = there > 0 ? bf16_to_float(from.exp_avg_scales[i / kMomentGroup]) : 0;
    Pack<std::uint8_t, kFour> v{};
    float step = 0;
    if constexpr (kSquare) {
      v = load_part<kFour>(static_cast<const std::uint8_t*>(from.exp_avg_sq) + i, there, whole);
      if (there > 0) step = roots_a_code(bf16_to_float(from.exp_avg_sq_scales[i / kMomentGroup]));
    }
    Moments moments;
#pragma unroll
    for (unsigned k = 0; k < kFour; ++k) {
      moments.m[k] = exp_avg_from_int8(m.at[k], scale);
      moments.v[k] = exp_avg_sq_from_uint8(v.at[k], step);
    }
    return moments;
  }
  // No thread writes a scale before its whole group has read it: what group_scale() exchanges was computed from it.
  template <bool kSquare>
  static __device__ void store(const ReducedMoments& to, const Moments& moments, std::uint64_t key, std::size_t i,
                               unsigned there, bool whole) {
    std::uint32_t largest = 0;
#pragma unroll
    for (unsigned k = 0; k < kFour; ++k)
      largest = magnitude_bits(moments.m[k]) > largest ? magnitude_bits(moments.m[k]) : largest;
    const std::uint16_t scale = group_scale(largest);
    const bool first = i % kMomentGroup == 0 && there > 0;
    Pack<std::int8_t, kFour> m{};
#pragma unroll
    for (unsigned k = 0; k < kFour; ++k) m.at[k] = exp_avg_to_int8(moments.m[k], bf16_to_float(scale));
    store_part(static_cast<std::int8_t*>(to.exp_avg) + i, m, there, whole);
    if (first) to.exp_avg_scales[i / kMomentGroup] = scale;
    if constexpr (kSquare) {
      float root[kFour];
      std::uint32_t largest_root = 0;
#pragma unroll
      for (unsigned k = 0; k < kFour; ++k) {
        root[k] = __fsqrt_rn(moments.v[k]);
        largest_root = magnitude_bits(root[k]) > largest_root ? magnitude_bits(root[k]) : largest_root;
      }
      const std::uint16_t root_scale = group_scale(largest_root);
      const float codes = codes_a_root(bf16_to_float(root_scale));
      Pack<std::uint8_t, kFour> v{};
#pragma unroll
      for (unsigned k = 0; k < kFour; ++k)
        v.at[k] = root_to_uint8(root[k], codes, random_of_exp_avg_sq(rounding_bits(key, to.index + i + k)));
      store_part(static_cast<std::uint8_t*>(to.exp_avg_sq) + i, v, there, whole);
      if (first) to.exp_avg_sq_scales[i / kMomentGroup] = root_scale;
    }
  }
};

// Every thread takes four elements, those past the end none: whole warps find scales together. What a thread lacks is 0
// and changes no scale.
template <typename Type, OptimizerKind kKind, MomentFormat kFormat>
__global__ void update_fours(const OptimizerTile tile, const OptimizerScalars scalars, std::size_t begin,
                             std::size_t end, bool aligned, std::uint32_t* finite) {
  follow_on();
  constexpr bool kSquare = has_exp_avg_sq(kKind);
  const std::size_t i = begin + (std::size_t{blockIdx.x} * kReducedThreads + threadIdx.x) * kFour;
  const unsigned there = i >= end ? 0 : end - i < kFour ? static_cast<unsigned>(end - i) : kFour;
  const bool whole = aligned && there == kFour;
  Weights<Type, kFour> weights;
  weights.load(tile, i, there, whole);
  Moments moments = Stored<kFormat>::template load<kSquare>(tile.reduced, i, there, whole);
  bool good = true;
#pragma unroll
  for (unsigned k = 0; k < kFour; ++k) {
    Element e{weights.at(k), moments.m[k], moments.v[k], Type::widen(weights.gradient.at[k])};
    const bool is_finite = step<kKind>(e, scalars), read_finite = weights.put(k, e.weight);
    moments.m[k] = e.exp_avg;
    if constexpr (kSquare) moments.v[k] = e.exp_avg_sq;
    good &= k >= there ||
            (is_finite && read_finite && is_storable(e.exp_avg, kFormat) && is_storable(e.exp_avg_sq, kFormat));
  }
  weights.store(tile, i, there, whole);
  Stored<kFormat>::template store<kSquare>(tile.reduced, moments, scalars.rounding_key, i, there, whole);
  if (!good) *finite = 0;
}

template <typename Type, OptimizerKind kKind, MomentFormat kFormat>
void launch_fours(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                  std::uint32_t* finite, cudaStream_t stream) {
  using Weight = typename Type::Element;
  using Moment = std::conditional_t<kFormat == MomentFormat::kInt8, std::int8_t, std::uint16_t>;
  const auto aligns = [begin](const auto* array) { return array == nullptr || packs_align<kFour>(array + begin); };
  const bool aligned = aligns(static_cast<const Weight*>(tile.weight)) &&
                       aligns(static_cast<const Weight*>(tile.gradient)) && aligns(tile.residual) &&
                       aligns(tile.master) && aligns(static_cast<const Moment*>(tile.reduced.exp_avg)) &&
                       aligns(static_cast<const Moment*>(tile.reduced.exp_avg_sq));
  const unsigned grid = blocks_for((end - begin + kFour - 1) / kFour, kReducedThreads);
  launch_following("the update of a tile", update_fours<Type, kKind, kFormat>, grid, kReducedThreads, stream, tile,
                   scalars, begin, end, aligned, finite);
}

template <typename Type, OptimizerKind kKind>
void launch_format(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                   std::uint32_t* finite, cudaStream_t stream) {
  if (tile.reduced.format == MomentFormat::kInt8)
    return launch_fours<Type, kKind, MomentFormat::kInt8>(tile, scalars, begin, end, finite, stream);
  return launch_fours<Type, kKind, MomentFormat::kBFloat16>(tile, scalars, begin, end, finite, stream);
}

}  // namespace

void update_reduced(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::uint32_t* finite, cudaStream_t stream) {
  for_type(tile.type, [&]<typename Type>(Type) {
    if (scalars.kind == OptimizerKind::kLion)
      return launch_format<Type, OptimizerKind::kLion>(tile, scalars, begin, end, finite, stream);
    return launch_format<Type, OptimizerKind::kAdam>(tile, scalars, begin, end, finite, stream);
  });
}

}  // namespace spillway::cuda
