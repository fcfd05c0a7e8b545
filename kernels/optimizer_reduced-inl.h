// Updates of tiles whose moments are bf16 or int8, once per instruction set: decoded into registers, updated as the
// exact ones are, and encoded again, with the bits of kernels/moments.h. Included by optimizer.cc alone.
//
// Elements go in chunks of 32, a group of int8 moments. A group's scale is known only once its last element is updated,
// so its new moments wait on the stack. Several chunks are updated before the first of them is encoded: the one's long
// chain of divisions and the search for its scale then overlap with the others'.
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/moments.h"
#include "kernels/optimizer_lanes-inl.h"

#if defined(SPILLWAY_OPTIMIZER_REDUCED_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_OPTIMIZER_REDUCED_INL_H
#undef SPILLWAY_OPTIMIZER_REDUCED_INL_H
#else
#define SPILLWAY_OPTIMIZER_REDUCED_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace spillway::HWY_NAMESPACE {
namespace {

static_assert(kMomentGroup == kLine);

// rounding_bits() of consecutive elements.
struct Generator {
  std::uint64_t key, index;  // of the tile's first element

  HWY_INLINE Bits at(std::size_t i) const {
    const std::uint64_t first = index + i;
    const auto lower = static_cast<std::uint32_t>(first), upper = static_cast<std::uint32_t>(first >> 32);
    const auto low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
    const Bits lowers = hn::Add(hn::Set(U32(), lower), hn::Iota(U32(), 0));
    const Bits uppers =
        hn::IfThenElse(hn::Lt(lowers, hn::Set(U32(), lower)),  // past a multiple of 2^32
                       hn::Set(U32(), (upper + 1) * kUpperFactor + low), hn::Set(U32(), upper * kUpperFactor + low));
    Bits x = hn::Xor(lowers, uppers);
    x = hn::Add(hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(U32(), kFirstFactor)), hn::Set(U32(), high));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(U32(), kSecondFactor));
    return hn::Xor(x, hn::ShiftRight<16>(x));
  }
};

// How moments lie in memory. A chunk's are decoded vector by vector with load(); keep() takes the new ones, and
// finish() ends the chunk.
struct Bf16Moments {
  using Average = std::uint16_t;
  using Square = std::uint16_t;
  static constexpr bool kScaled = false;
  static constexpr MomentFormat kFormat = MomentFormat::kBFloat16;

  template <Rule kRule>
  struct Chunk {
    Average* HWY_RESTRICT average;
    Square* HWY_RESTRICT square;
    std::uint16_t *average_scale, *square_scale;
    Generator generator;
    std::size_t first;  // of the tile, as the generator counts

    static HWY_INLINE Floats widen(const std::uint16_t* from) {
      return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
    }
    static HWY_INLINE void put(Floats x, Bits random, std::uint16_t* to) {
      const Bits rounded = hn::ShiftRight<16>(hn::Add(hn::BitCast(U32(), x), random));
      hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), rounded)), U16(), to);
    }
    HWY_INLINE void start() {}
    HWY_INLINE void load(std::size_t k, Floats& m, Floats& v) const {
      m = widen(average + k);
      if constexpr (kept_square(kRule)) v = widen(square + k);
    }
    HWY_INLINE void keep(std::size_t k, Floats m, Floats v, Floats /*root*/) {
      const Bits random = generator.at(first + k);
      put(m, hn::And(random, hn::Set(U32(), 0xffffu)), average + k);
      if constexpr (kept_square(kRule)) put(v, hn::ShiftRight<16>(random), square + k);
    }
    HWY_INLINE void finish() {}
  };
};

struct Int8Moments {
  using Average = std::int8_t;
  using Square = std::uint8_t;
  static constexpr bool kScaled = true;
  static constexpr MomentFormat kFormat = MomentFormat::kInt8;
  using I8 = hn::Rebind<std::int8_t, F32>;
  using U8 = hn::Rebind<std::uint8_t, F32>;

  template <Rule kRule>
  struct Chunk {
    Average* HWY_RESTRICT average;
    Square* HWY_RESTRICT square;
    std::uint16_t *average_scale, *square_scale;
    Generator generator;
    std::size_t first;
    float scale = 0, step = 0;  // as they were
    float averages[kMomentGroup], roots[kMomentGroup];

    HWY_INLINE void start() {
      scale = bf16_to_float(*average_scale);
      if constexpr (kept_square(kRule)) step = roots_a_code(bf16_to_float(*square_scale));
    }
    HWY_INLINE void load(std::size_t k, Floats& m, Floats& v) const {
      const Floats q = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(I8(), average + k)));
      m = hn::Mul(hn::Div(q, hn::Sub(hn::Set(F32(), 254.0f), hn::Abs(q))), hn::Set(F32(), scale));
      if constexpr (kept_square(kRule)) {
        const Floats code = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(U8(), square + k)));
        const Floats root = hn::Mul(code, hn::Set(F32(), step));
        v = hn::Mul(root, root);
      }
    }
    HWY_INLINE void keep(std::size_t k, Floats m, Floats /*v*/, Floats root) {
      hn::StoreU(m, F32(), averages + k);
      if constexpr (kept_square(kRule)) hn::StoreU(root, F32(), roots + k);
    }
    HWY_INLINE void finish() {
      put_averages();
      if constexpr (kept_square(kRule)) put_roots();
    }

    // The largest magnitude of the group, rounded up to bf16.
    static HWY_INLINE Floats scale_of(const float* values, std::uint16_t* to) {
      Bits largest = hn::Zero(U32());
      for (std::size_t k = 0; k < kMomentGroup; k += hn::Lanes(F32()))
        largest = hn::Max(largest, magnitude(hn::LoadU(F32(), values + k)));
      const Bits up = hn::ShiftRight<16>(hn::Add(hn::MaxOfLanes(U32(), largest), hn::Set(U32(), 0xffffu)));
      *to = static_cast<std::uint16_t>(hn::GetLane(up));
      return hn::BitCast(F32(), hn::ShiftLeft<16>(up));
    }
    HWY_INLINE void put_averages() {
      const Floats scales = scale_of(averages, average_scale);
      for (std::size_t k = 0; k < kMomentGroup; k += hn::Lanes(F32())) {
        const Floats m = hn::LoadU(F32(), averages + k);
        const Floats sum = hn::Max(hn::Add(scales, hn::Abs(m)), hn::Set(F32(), kLeastSum));
        const Floats companded = hn::Mul(hn::Div(m, sum), hn::Set(F32(), 254.0f));
        const auto code = hn::Sub(hn::BitCast(I32(), hn::Add(companded, hn::Set(F32(), kNearest))),
                                  hn::Set(I32(), static_cast<std::int32_t>(kNearestBits)));
        hn::StoreU(hn::DemoteTo(I8(), code), I8(), average + k);
      }
    }
    HWY_INLINE void put_roots() {
      const Floats scales = hn::Max(scale_of(roots, square_scale), hn::Set(F32(), kLeastRoot));
      const Floats codes_a_root = hn::Div(hn::Set(F32(), 255.0f), scales);
      for (std::size_t k = 0; k < kMomentGroup; k += hn::Lanes(F32())) {
        const Floats root = hn::LoadU(F32(), roots + k);
        const auto random = hn::BitCast(I32(), hn::ShiftRight<16>(generator.at(first + k)));
        Floats code =
            hn::Add(hn::Mul(root, codes_a_root), hn::Mul(hn::ConvertTo(F32(), random), hn::Set(F32(), 0x1p-16f)));
        const Floats least = hn::IfThenElseZero(hn::Gt(root, hn::Zero(F32())), hn::Set(F32(), 1.0f));
        code = hn::Max(hn::Min(code, hn::Set(F32(), 255.0f)), least);
        hn::StoreU(hn::DemoteTo(U8(), hn::ConvertTo(I32(), code)), U8(), square + k);
      }
    }
  };
};

// Updates a chunk of the weights, from element i of `a` on. The largest magnitudes: as forward and backward read
// weights, and of moments before they are encoded.
template <typename Format, Rule kRule, Decay kDecay, typename Chunk>
HWY_INLINE void update_chunk(const WeightArrays<typename Format::Element>& a, std::size_t i, Chunk& chunk,
                             const Constants& c, Bits& weights, Bits& moments) {
  chunk.start();
  for (std::size_t k = 0; k < kLine; k += hn::Lanes(F32())) {
    Floats m = hn::Zero(F32()), v = hn::Zero(F32()), root = hn::Zero(F32());
    chunk.load(k, m, v);
    weights = hn::Max(weights, update_weights<Format, kRule, kDecay>(a, i + k, c, m, v, root));
    moments = hn::Max(moments, hn::Max(magnitude(m), magnitude(v)));
    chunk.keep(k, m, v, root);
  }
}

// The last, incomplete chunk: through a copy on the stack.
template <typename Format, Rule kRule, Decay kDecay, typename Moments>
HWY_INLINE void update_chunk_tail(const WeightArrays<typename Format::Element>& a, std::size_t begin, std::size_t count,
                                  typename Moments::template Chunk<kRule>& chunk, const Constants& c, Bits& weights,
                                  Bits& moments) {
  WeightsTail<Format, kLine> copy(a, begin, count);
  typename Moments::Average average[kLine];
  typename Moments::Square square[kLine];
  auto* const average_to = chunk.average;
  auto* const square_to = chunk.square;
  for (std::size_t lane = 0; lane < kLine; ++lane) {
    const std::size_t from = lane < count ? lane : count - 1;
    average[lane] = average_to[from];
    if constexpr (kept_square(kRule)) square[lane] = square_to[from];
  }
  chunk.average = average, chunk.square = square;
  update_chunk<Format, kRule, kDecay>(copy.arrays(), 0, chunk, c, weights, moments);
  chunk.finish();
  copy.copy_back(a, begin, count);
  std::memcpy(average_to, average, count * sizeof(average[0]));
  if constexpr (kept_square(kRule)) std::memcpy(square_to, square, count * sizeof(square[0]));
}

template <typename Format, Rule kRule, Decay kDecay, typename Moments>
bool update_reduced(const OptimizerTile& tile, const OptimizerScalars& scalars, std::size_t begin, std::size_t end,
                    std::size_t near) {
  using Element = typename Format::Element;
  const WeightArrays<Element> a = weights_of<Element>(tile);
  const ReducedMoments& reduced = tile.reduced;
  const Constants c(scalars);
  auto* const average = static_cast<typename Moments::Average*>(reduced.exp_avg);
  auto* const square = static_cast<typename Moments::Square*>(reduced.exp_avg_sq);
  using Chunk = typename Moments::template Chunk<kRule>;
  const auto place = [&](Chunk& chunk, std::size_t i) {
    chunk.average = average + i;
    chunk.square = kept_square(kRule) ? square + i : nullptr;
    chunk.average_scale = Moments::kScaled ? reduced.exp_avg_scales + i / kMomentGroup : nullptr;
    chunk.square_scale =
        Moments::kScaled && kept_square(kRule) ? reduced.exp_avg_sq_scales + i / kMomentGroup : nullptr;
    chunk.generator = {scalars.rounding_key, reduced.index};
    chunk.first = i;
  };
  Bits weights = hn::Zero(U32()), moments = hn::Zero(U32());
  constexpr std::size_t kTogether = Moments::kScaled ? 8 : 1;
  Chunk chunks[kTogether];
  std::size_t i = begin;
  while (i + kLine <= end) {
    const std::size_t count = std::min(kTogether, (end - i) / kLine);
    for (std::size_t n = 0; n < count; ++n, i += kLine) {
      prefetch<Format>(a, i, near);
      prefetch(average + i, near);
      if constexpr (kept_square(kRule)) prefetch(square + i, near);
      prefetch(a.gradient + i, near);
      place(chunks[n], i);
      update_chunk<Format, kRule, kDecay>(a, i, chunks[n], c, weights, moments);
    }
    for (std::size_t n = 0; n < count; ++n) chunks[n].finish();
  }
  if (i < end) {
    place(chunks[0], i);
    update_chunk_tail<Format, kRule, kDecay, Moments>(a, i, end - i, chunks[0], c, weights, moments);
  }
  return hn::AllTrue(U32(), hn::Lt(weights, hn::Set(U32(), 0x7f800000u))) &&
         hn::AllTrue(U32(), hn::Lt(moments, hn::Set(U32(), largest_moment(Moments::kFormat) + 1)));
}

}  // namespace
}  // namespace spillway::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
