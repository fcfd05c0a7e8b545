#include "tests/src/comm/thread_transport.h"

#include <algorithm>
#include <cstring>

#include "spillway/error.h"

namespace spillway {

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(ThreadHub& hub, std::uint32_t rank) : hub_(hub), rank_(rank) {}

  std::uint32_t rank() const noexcept override { return rank_; }
  std::uint32_t ranks() const noexcept override { return hub_.ranks_; }
  std::string library() const override { return "threads"; }
  std::string host() const override { return "host" + std::to_string(rank_); }
  std::size_t most_bytes() const noexcept override { return 20'000; }  // some collectives have more, some less

  void send(std::uint32_t to, Channel channel, std::span<const std::byte> data, Ticket ticket) override {
    const std::lock_guard lock(hub_.mutex_);
    over_.push_back(ticket);
    ThreadHub::OfRank& self = hub_.of_rank_[rank_];
    const bool lost = channel == Channel::kWords && !self.lose.empty() && self.lose[to] > 0;
    if (lost) --self.lose[to];
    if (self.silent || lost) return;
    hub_.sent_[{rank_, to, channel}].emplace_back(data.begin(), data.end());
  }

  void receive(std::uint32_t from, Channel channel, std::span<std::byte> data, Ticket ticket) override {
    receives_.push_back({from, channel, data, ticket});
  }

  void all_gather(std::span<std::byte> data, std::span<const SlicePart> parts, Ticket ticket) override {
    meet(ThreadHub::Kind::kAllGather, data, parts, 0, ticket);
  }
  void broadcast(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override {
    meet(ThreadHub::Kind::kBroadcast, data, {}, root, ticket);
  }
  void reduce(std::span<std::byte> data, std::uint32_t root, Ticket ticket) override {
    meet(ThreadHub::Kind::kReduce, data, {}, root, ticket);
  }
  void reduce_scatter(std::span<std::byte> data, std::span<const std::uint64_t> slices, Ticket ticket) override {
    std::vector<SlicePart> parts;
    for (const std::uint64_t slice : slices) {
      parts.push_back({.begin = parts.empty() ? 0 : parts.back().begin + parts.back().bytes, .bytes = slice});
    }
    meet(ThreadHub::Kind::kReduceScatter, data, parts, 0, ticket);
  }

  std::size_t poll(std::span<Ticket> over) override {
    std::unique_lock lock(hub_.mutex_);
    while (hub_.of_rank_[rank_].hangs) hub_.never_.wait(lock);
    if (!hub_.of_rank_[rank_].silent) {
      take_messages();
      end_meetings();
    }
    const std::size_t count = std::min(over.size(), over_.size());
    std::copy_n(over_.begin(), count, over.begin());
    over_.erase(over_.begin(), over_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  std::string failure() const override {
    const std::lock_guard lock(hub_.mutex_);
    return hub_.of_rank_[rank_].broken;
  }
  bool close(Parting) noexcept override { return true; }

 private:
  struct Receive {
    std::uint32_t from;
    Channel channel;
    std::span<std::byte> data;
    Ticket ticket;
  };
  struct Met {
    std::uint64_t place;
    std::span<std::byte> data;
    std::vector<SlicePart> parts;
    Ticket ticket;
  };

  void take_messages() {
    for (auto receive = receives_.begin(); receive != receives_.end();) {
      auto& sent = hub_.sent_[{receive->from, rank_, receive->channel}];
      if (sent.empty()) {
        ++receive;
        continue;
      }
      SPILLWAY_CHECK(sent.front().size() == receive->data.size(), "a message has the length of its receive");
      std::ranges::copy(sent.front(), receive->data.begin());
      sent.pop_front();
      over_.push_back(receive->ticket);
      receive = receives_.erase(receive);
    }
  }

  void meet(ThreadHub::Kind kind, std::span<std::byte> data, std::span<const SlicePart> parts, std::uint32_t root,
            Ticket ticket) {
    const std::lock_guard lock(hub_.mutex_);
    if (hub_.of_rank_[rank_].silent) return;
    met_.push_back({place_, data, {parts.begin(), parts.end()}, ticket});
    ThreadHub::Meeting& meeting = hub_.meetings_[place_++];
    if (meeting.come == 0) {
      meeting.kind = kind;
      meeting.root = root;
      meeting.brought.resize(hub_.ranks_);
    }
    SPILLWAY_CHECK(meeting.kind == kind && meeting.root == root, "all ranks start the same collectives");
    meeting.brought[rank_].assign(data.begin(), data.end());
    ++meeting.come;
  }

  void end_meetings() {
    for (auto met = met_.begin(); met != met_.end();) {
      ThreadHub::Meeting& meeting = hub_.meetings_[met->place];
      if (meeting.come < hub_.ranks_) {
        ++met;
        continue;
      }
      end(*met, meeting);
      over_.push_back(met->ticket);
      if (++meeting.gone == hub_.ranks_) hub_.meetings_.erase(met->place);
      met = met_.erase(met);
    }
  }

  void end(const Met& met, const ThreadHub::Meeting& meeting) const {
    switch (meeting.kind) {
      case ThreadHub::Kind::kBroadcast:  // what the root has is only read there
        if (rank_ != meeting.root) std::ranges::copy(meeting.brought[meeting.root], met.data.begin());
        return;
      case ThreadHub::Kind::kReduce:
        if (rank_ == meeting.root) sum(meeting, met.data, 0);
        return;
      case ThreadHub::Kind::kAllGather:
      case ThreadHub::Kind::kReduceScatter: break;
    }
    for (std::uint32_t rank = 0; rank < hub_.ranks_; ++rank) {
      const std::size_t begin = met.parts[rank].begin;
      const std::span<std::byte> slice = met.data.subspan(begin, met.parts[rank].bytes);
      if (meeting.kind == ThreadHub::Kind::kAllGather) {
        if (rank == rank_) continue;
        std::copy_n(meeting.brought[rank].begin() + static_cast<std::ptrdiff_t>(begin), slice.size(), slice.begin());
      } else if (rank == rank_) {
        sum(meeting, slice, begin);
      }
    }
  }

  // From the last rank to the first: not the tree's order.
  void sum(const ThreadHub::Meeting& meeting, std::span<std::byte> to, std::size_t begin) const {
    for (std::size_t at = 0; at < to.size(); at += sizeof(float)) {
      float total = 0;
      for (std::uint32_t rank = hub_.ranks_; rank-- > 0;) {
        float value = 0;
        std::memcpy(&value, meeting.brought[rank].data() + begin + at, sizeof(value));
        total += value;
      }
      std::memcpy(to.data() + at, &total, sizeof(total));
    }
  }

  ThreadHub& hub_;
  const std::uint32_t rank_;
  std::uint64_t place_ = 0;
  std::vector<Receive> receives_;
  std::vector<Met> met_;
  std::vector<Ticket> over_;
};

std::unique_ptr<Transport> ThreadHub::join(std::uint32_t rank) {
  return std::make_unique<ThreadTransport>(*this, rank);
}

void ThreadHub::silence(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  of_rank_[rank].silent = true;
}

void ThreadHub::lose_a_word(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  of_rank_[rank].lose.assign(ranks_, 1);
}

void ThreadHub::hang(std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  of_rank_[rank].hangs = true;
}

void ThreadHub::break_down(std::uint32_t rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  of_rank_[rank].broken = why;
}

}  // namespace spillway
