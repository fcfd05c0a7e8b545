#include "src/comm/transfers.h"

#include <algorithm>

#include "src/comm/sum_tree.h"
#include "src/comm/wire.h"

namespace spillway {
namespace {

constexpr std::size_t kPiecesOut = 4;

// Whole vectors, so that no message is tiny for want of scratch memory; and no more than is still in a cache when it is
// added up (two ranks on one host: 1 MiB 0.68 GB/s, 8 MiB 0.55, by `mpirun -n 2 spillway doctor --ranks`).
std::uint64_t tree_chunk(const TransferLimits& limits, std::uint64_t ranks) {
  constexpr std::uint64_t kLeast = 4 * kKiB, kMost = kMiB;
  if (ranks == 1) return 0;
  return std::clamp(align_down(limits.scratch_bytes / (2 * (ranks - 1)), kLeast), kLeast, kMost);
}

// Of each slice. Not tiny where there are many ranks and only one of them has something.
std::uint64_t gather_chunk(const TransferLimits& limits, std::uint64_t ranks) {
  const std::uint64_t least = std::min<std::uint64_t>(limits.piece_bytes, 64 * kKiB);
  return std::max(align_down(limits.piece_bytes / ranks, 4 * kKiB), least);
}

}  // namespace

Transfers::Transfers(Transport& transport, const TransferLimits& limits, Ticket ticket)
    : transport_(transport),
      limits_(limits),
      first_(ticket),
      tree_chunk_bytes_(tree_chunk(limits, transport.ranks())),
      gather_chunk_bytes_(gather_chunk(limits, transport.ranks())),
      scratch_(2 * tree_chunk_bytes_ * (transport.ranks() - 1)),
      parts_(transport.ranks()),
      gathered_(transport.ranks()) {
  begun_.reserve(kAhead);
}

bool Transfers::is_tree(const Collective& call) const noexcept {
  return call.kind == CollectiveKind::kReduceScatter && (call.sums == Sums::kTree || !transport_.has_sums());
}

void Transfers::begin(std::uint64_t number, const Collective& call) {
  Transfer& transfer = transfers_[number % kAhead];
  transfer = {.number = number, .call = call};
  std::uint64_t longest = call.data.size();
  if (!call.slices.empty()) longest = *std::ranges::max_element(call.slices);
  const bool gathers = call.kind == CollectiveKind::kAllGather;
  transfer.direct = call.kind != CollectiveKind::kBroadcast && call.data.size() <= transport_.most_bytes() &&
                    (gathers || call.data.size() <= limits_.direct_bytes);
  if (transport_.ranks() == 1) {
    transfer.chunks = 0;  // it is there
  } else if (is_tree(call)) {
    transfer.chunks = div_up(longest, tree_chunk_bytes_);
  } else if (transfer.direct) {
    transfer.chunks = gathers ? div_up(longest, gather_chunk_bytes_) : longest > 0 ? 1 : 0;
  } else {
    transfer.chunks = div_up<std::uint64_t>(longest, limits_.piece_bytes);
  }
  if (call.kind == CollectiveKind::kBroadcast) transfer.rank = call.root;
  begun_.push_back(number);
}

// Its part of that rank's slice; of a broadcast, of all.
SlicePart Transfers::part(const Transfer& transfer, std::uint32_t rank, std::uint64_t chunk,
                          std::uint64_t chunk_bytes) const {
  SlicePart slice{.begin = 0, .bytes = transfer.call.data.size()};
  if (!transfer.call.slices.empty()) {
    for (std::uint32_t before = 0; before < rank; ++before) slice.begin += transfer.call.slices[before];
    slice.bytes = transfer.call.slices[rank];
  }
  const std::uint64_t from = std::min(slice.bytes, chunk * chunk_bytes);
  return {.begin = slice.begin + from, .bytes = std::min(chunk_bytes, slice.bytes - from)};
}
std::span<std::byte> Transfers::piece(const Transfer& transfer, std::uint32_t rank, std::uint64_t chunk,
                                      std::uint64_t chunk_bytes) const {
  const SlicePart found = part(transfer, rank, chunk, chunk_bytes);
  return transfer.call.data.subspan(found.begin, found.bytes);
}

std::byte* Transfers::received(std::size_t half, std::uint32_t rank) {
  const std::uint32_t place = rank < transport_.rank() ? rank : rank - 1;
  return scratch_.data() + (half * (transport_.ranks() - 1) + place) * tree_chunk_bytes_;
}

bool Transfers::start_more() {
  const auto next =
      std::ranges::find_if(begun_, [&](std::uint64_t number) { return !transfers_[number % kAhead].all_started(); });
  if (next == begun_.end()) return false;
  Transfer& transfer = transfers_[*next % kAhead];
  if (!is_tree(transfer.call)) {
    if (pieces_out_ == kPiecesOut) return false;
    start_piece(transfer);
    return true;
  }
  // The scratch memory serves one tree at a time.
  const bool taken = std::any_of(begun_.begin(), next, [&](std::uint64_t number) {
    const Transfer& before = transfers_[number % kAhead];
    return is_tree(before.call) && before.out[0] + before.out[1] > 0;
  });
  if (taken || transfer.out[transfer.chunk % 2] > 0) return false;
  start_chunk_of_tree(transfer);
  return true;
}

// How many of the bytes of fp32 values travel.
std::size_t Transfers::travelling(const Transfer& transfer, std::size_t bytes) const noexcept {
  return bytes / sizeof(float) * size_of(transfer.call.wire);
}

void Transfers::start_chunk_of_tree(Transfer& transfer) {
  const std::uint64_t chunk = transfer.chunk++;
  const std::size_t half = chunk % 2;
  const std::uint32_t self = transport_.rank(), ranks = transport_.ranks();
  const Ticket ticket = first_ + transfer.number % kAhead * 2 + half;
  const std::span<std::byte> own = piece(transfer, self, chunk, tree_chunk_bytes_);
  if (!own.empty()) transfer.adds[half] = chunk;
  for (std::uint32_t i = 1; i < ranks; ++i) {
    const std::uint32_t from = (self + ranks - i) % ranks, to = (self + i) % ranks;
    if (!own.empty()) {
      ++transfer.out[half];
      transport_.receive(from, Channel::kData, {received(half, from), travelling(transfer, own.size())}, ticket);
    }
    const std::span<std::byte> others = piece(transfer, to, chunk, tree_chunk_bytes_);
    if (!others.empty()) {
      ++transfer.out[half];
      narrow_in_place(others, transfer.call.wire);
      transport_.send(to, Channel::kData, others.first(travelling(transfer, others.size())), ticket);
    }
  }
}

void Transfers::add_up(Transfer& transfer, std::size_t half) {
  const std::uint32_t self = transport_.rank();
  const std::span<std::byte> own = piece(transfer, self, *transfer.adds[half], tree_chunk_bytes_);
  const DType wire = transfer.call.wire;
  narrow_in_place(own, wire);
  for (std::uint32_t rank = 0; rank < transport_.ranks(); ++rank) {
    std::byte* const part = rank == self ? own.data() : received(half, rank);
    widen_in_place({part, own.size()}, wire);
    parts_[rank] = reinterpret_cast<const float*>(part);
  }
  sum_in_tree(parts_, reinterpret_cast<float*>(own.data()), own.size() / sizeof(float));
  transfer.adds[half].reset();
}

void Transfers::start_piece(Transfer& transfer) {
  const Ticket ticket = first_ + transfer.number % kAhead * 2;
  const Collective& call = transfer.call;
  const auto out = [&] {
    ++transfer.out[0];
    ++pieces_out_;
  };
  if (transfer.direct) {
    const std::uint64_t chunk = transfer.chunk++;
    out();
    if (call.kind == CollectiveKind::kAllGather) {
      for (std::uint32_t rank = 0; rank < gathered_.size(); ++rank) {
        gathered_[rank] = part(transfer, rank, chunk, gather_chunk_bytes_);
      }
      return transport_.all_gather(call.data, gathered_, ticket);
    }
    return transport_.reduce_scatter(call.data, call.slices, ticket);
  }
  const std::uint32_t root = transfer.rank;
  const std::span<std::byte> data = piece(transfer, root, transfer.chunk, limits_.piece_bytes);
  if (call.kind == CollectiveKind::kBroadcast || ++transfer.rank == transport_.ranks()) {
    ++transfer.chunk;
    if (call.kind != CollectiveKind::kBroadcast) transfer.rank = 0;
  }
  if (data.empty()) return;
  out();
  if (call.kind == CollectiveKind::kReduceScatter) return transport_.reduce(data, root, ticket);
  transport_.broadcast(data, root, ticket);
}

void Transfers::take(Ticket ticket) {
  const std::uint64_t index = ticket - first_;
  Transfer& transfer = transfers_[index / 2];
  const std::size_t half = index % 2;
  if (!is_tree(transfer.call)) --pieces_out_;
  if (--transfer.out[half] == 0 && transfer.adds[half]) add_up(transfer, half);
}

std::optional<std::uint64_t> Transfers::next_over() {
  const auto over = std::ranges::find_if(begun_, [&](std::uint64_t number) {
    const Transfer& transfer = transfers_[number % kAhead];
    return transfer.all_started() && transfer.out[0] + transfer.out[1] == 0;
  });
  if (over == begun_.end()) return std::nullopt;
  const std::uint64_t number = *over;
  begun_.erase(over);
  return number;
}

}  // namespace spillway
