#include "src/engine/rank_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>
#include <string>
#include <string_view>

#include "spillway/error.h"

namespace spillway {
namespace {

constexpr std::uint64_t kTravelAtOnce = 64 * 1024;

std::string_view call_name(AskedValues::Call call) {
  return call == AskedValues::Call::kRead ? "read_values" : "write_values";
}

std::string asked_words(const AskedValues& asked, const ModelDescription& model) {
  constexpr std::array kNames = {"the master", "exp_avg", "exp_avg_sq", "the gradient"};
  const bool known = asked.block < model.blocks.size() && asked.parameter < model.blocks[asked.block].parameters.size();
  const std::string whose = known ? model.blocks[asked.block].parameters[asked.parameter].name
                                  : fmt::format("parameter {} of block {}", asked.parameter, asked.block);
  const std::string from = asked.call == AskedValues::Call::kWrite ? fmt::format(", from rank {}", asked.from) : "";
  return fmt::format("{} of {}{}", kNames[static_cast<std::size_t>(asked.of)], whose, from);
}

// On its way from the rank whose part it is of; without values, where there it has failed.
class TravellingPiece {
 public:
  // The first float is a flag: values and "there are none" travel in one and the same broadcast.
  TravellingPiece() : memory_(1 + kTravelAtOnce) {}

  std::span<float> values(std::uint64_t count) { return std::span(memory_).subspan(1, count); }
  bool holds_values() const { return memory_[0] == 0; }
  void note_failure() { memory_[0] = 1; }
  void broadcast(Agreement& agreement, std::uint64_t count, std::uint32_t root) {
    agreement.broadcast(std::as_writable_bytes(std::span(memory_).first(1 + count)), root);
  }

 private:
  std::vector<float> memory_;
};

// What fails once all of the part is shown, which keeps nobody from going on, is returned.
std::exception_ptr visit_own(Agreement& agreement, const Shard& part, TravellingPiece& piece,
                             const std::function<void(const ValueSink& put)>& bring, const ValueSink& sink) {
  const std::uint32_t own = agreement.rank().index;
  std::uint64_t shown = 0, filled = 0;
  const auto most = [&] { return std::min(kTravelAtOnce, part.count - shown); };
  try {
    bring([&](std::uint64_t, std::span<const float> values) {
      while (!values.empty()) {
        const std::uint64_t count = std::min<std::uint64_t>(values.size(), most() - filled);
        std::ranges::copy(values.first(count), piece.values(filled + count).subspan(filled).begin());
        values = values.subspan(count);
        filled += count;
        if (filled < most()) continue;
        piece.broadcast(agreement, filled, own);
        sink(part.first + shown, piece.values(filled));
        shown += filled;
        filled = 0;
      }
    });
    SPILLWAY_CHECK(shown == part.count, "a rank brings all of its part");
  } catch (...) {
    if (shown == part.count) return std::current_exception();
    // The others wait for this broadcast: it tells them that no values come.
    piece.note_failure();
    piece.broadcast(agreement, most(), own);
    throw;
  }
  return nullptr;
}

}  // namespace

void refuse_other_values(Agreement& agreement, const AskedValues& own, const ModelDescription& model) {
  // Collective calls that differ would wait for each other for ever, so they are compared first.
  if (agreement.alone()) return;
  AskedValues first = own;
  agreement.broadcast(std::as_writable_bytes(std::span(&first, 1)), 0);
  agreement.all([&] {
    if (own == first) return;
    throw Error(Code::kInvalidArgument,
                {std::string(call_name(own.call)),
                 fmt::format("is called for {}, and on rank 0 {} for {}", asked_words(own, model),
                             call_name(first.call), asked_words(first, model)),
                 0, "make the same calls on all ranks, in the same order"});
  });
}

std::vector<Shard> parts_of(const BlockPlan& block, std::uint32_t parameter) {
  const ParameterPlace& place = block.partition.parameters[parameter];
  const auto its = std::ranges::find_if(block.shares, [&](const SectionShare& share) {
    return place.first < std::accumulate(share.elements_of.begin(), share.elements_of.end(), share.first);
  });
  std::vector<Shard> parts;
  if (its == block.shares.end()) return parts;
  std::uint64_t first = its->first;
  for (const std::uint64_t elements : its->elements_of) {
    const std::uint64_t from = std::clamp(first, place.first, place.first + place.count);
    first += elements;
    const std::uint64_t to = std::clamp(first, place.first, place.first + place.count);
    parts.push_back({from - place.first, to - from});
  }
  return parts;
}

std::uint64_t first_of_gradient(const BlockPlan& block, std::uint32_t parameter, const Shard& own) {
  const std::uint64_t first = block.partition.parameters[parameter].first + own.first;
  const auto share = std::ranges::find_if(block.shares, [&](const SectionShare& section) {
    return section.own.first <= first && first < section.own.first + section.own.count;
  });
  return share == block.shares.end() ? 0 : share->gradient_first + first - share->own.first;
}

void visit_values(Agreement& agreement, std::span<const Shard> parts,
                  const std::function<void(const ValueSink& put)>& bring, const ValueSink& sink) {
  if (parts.size() == 1) return agreement.all([&] { bring(sink); });
  TravellingPiece piece;
  agreement.all([&] {
    std::exception_ptr failure;
    for (std::uint32_t rank = 0; rank < parts.size(); ++rank) {
      const Shard& part = parts[rank];
      if (rank == agreement.rank().index && part.count > 0) {
        failure = visit_own(agreement, part, piece, bring, sink);
        continue;
      }
      for (std::uint64_t at = 0; at < part.count; at += kTravelAtOnce) {
        const std::uint64_t count = std::min(kTravelAtOnce, part.count - at);
        piece.broadcast(agreement, count, rank);
        // That rank throws inside agreement_.all(), which tells all others.
        if (!piece.holds_values()) return;
        sink(part.first + at, piece.values(count));
      }
    }
    if (failure) std::rethrow_exception(failure);
  });
}

GivenValues::GivenValues(Agreement& agreement, std::uint32_t from, std::uint64_t count, std::span<const float> given)
    : agreement_(agreement),
      from_(from),
      count_(count),
      given_(given),
      piece_(agreement.alone() ? 0 : std::min(count, kTravelAtOnce)) {}

void GivenValues::to(const std::function<void()>& work) {
  agreement_.all([&] {
    try {
      work();
    } catch (...) {
      // The others still wait for the rest of the broadcasts.
      pass_rest();
      throw;
    }
    pass_rest();
  });
}

void GivenValues::take(std::uint64_t first, std::span<float> out) {
  if (agreement_.alone()) return void(std::ranges::copy(given_.subspan(first, out.size()), out.begin()));
  while (!out.empty()) {
    while (first >= end_) next();
    SPILLWAY_CHECK(first >= first_, "values are taken in increasing order");
    const std::uint64_t count = std::min<std::uint64_t>(out.size(), end_ - first);
    std::ranges::copy(std::span(piece_).subspan(first - first_, count), out.begin());
    out = out.subspan(count);
    first += count;
  }
}

void GivenValues::next() {
  first_ = end_;
  end_ = std::min(count_, first_ + kTravelAtOnce);
  const std::span<float> piece = std::span(piece_).first(end_ - first_);
  if (agreement_.rank().index == from_) std::ranges::copy(given_.subspan(first_, piece.size()), piece.begin());
  agreement_.broadcast(std::as_writable_bytes(piece), from_);
}

// Of no concern to this rank, or not any more.
void GivenValues::pass_rest() {
  while (!agreement_.alone() && end_ < count_) next();
}

}  // namespace spillway
