// Ranks over the API for C, as threads of this process whose messages go through pipes: one for each road, with a
// thread at each of its ends.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "spillway/c_ranks.h"

namespace spillway::testing {

// Messages of one direction between two ranks: a pipe, and a thread at each of its ends that moves one after the other.
class Road {
 public:
  Road() {
    EXPECT_EQ(0, ::pipe2(pipe_.data(), O_NONBLOCK));
    reader_.start(pipe_[0], POLLIN, [](int pipe, char* data, size_t bytes) { return ::read(pipe, data, bytes); });
    writer_.start(pipe_[1], POLLOUT, [](int pipe, char* data, size_t bytes) { return ::write(pipe, data, bytes); });
  }
  ~Road() {
    writer_.stop();
    reader_.stop();
    for (const int end : pipe_) ::close(end);
  }
  void send(const void* data, uint64_t bytes, spillway_message* message) {
    writer_.add({static_cast<char*>(const_cast<void*>(data)), bytes, message});
  }
  void receive(void* data, uint64_t bytes, spillway_message* message) {
    reader_.add({static_cast<char*>(data), bytes, message});
  }
  // What is not over by then is given up.
  void end_sends() { writer_.stop(); }
  void end_receives() { reader_.stop(); }

 private:
  struct Part {
    char* data;
    uint64_t bytes;
    spillway_message* message;
  };
  using Move = ssize_t (*)(int pipe, char* data, size_t bytes);

  class End {
   public:
    void start(int pipe, short event, Move move) {
      thread_ = std::thread([this, pipe, event, move] {
        for (Part part; next(part);) {
          const bool whole = moved(part, pipe, event, move);
          EXPECT_EQ(SPILLWAY_OK, spillway_message_over(part.message, whole ? nullptr : "the pipe is closed"));
        }
      });
    }
    void add(const Part& part) {
      const std::lock_guard lock(mutex_);
      parts_.push_back(part);
      changed_.notify_all();
    }
    void stop() {
      {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
        changed_.notify_all();
      }
      if (thread_.joinable()) thread_.join();
    }

   private:
    bool next(Part& part) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || !parts_.empty(); });
      if (parts_.empty()) return false;
      part = parts_.front();
      parts_.pop_front();
      return true;
    }
    bool moved(const Part& part, int pipe, short event, Move move) {
      for (uint64_t at = 0; at < part.bytes;) {
        const ssize_t bytes = move(pipe, part.data + at, part.bytes - at);
        if (bytes > 0) {
          at += static_cast<uint64_t>(bytes);
        } else if (bytes == 0 || errno != EAGAIN || stopped_) {
          return false;
        } else {
          pollfd ready = {pipe, event, 0};
          ::poll(&ready, 1, 10);
        }
      }
      return true;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Part> parts_;
    std::atomic<bool> stopped_ = false;
    std::thread thread_;
  };

  std::array<int, 2> pipe_{};
  End reader_, writer_;
};

class Pipes {
 public:
  explicit Pipes(uint32_t ranks) {
    for (uint32_t from = 0; from < ranks; ++from) {
      for (uint32_t to = 0; to < ranks; ++to) {
        for (spillway_channel channel : {0, 1}) {
          if (from != to) roads_[{from, to, channel}] = std::make_unique<Road>();
        }
      }
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) members_.push_back({this, rank});
    ranks_ = ranks;
  }
  spillway_transport table(uint32_t rank) {
    spillway_transport made = {};
    made.struct_size = sizeof made;
    made.user = &members_[rank];
    made.rank = rank;
    made.ranks = ranks_;
    made.library = "pipes";
    made.send = [](void* user, uint32_t to, spillway_channel channel, const void* data, uint64_t bytes,
                   spillway_message* message) {
      auto& [pipes, self] = *static_cast<Member*>(user);
      return pipes->roads_.at({self, to, channel})->send(data, bytes, message), 0;
    };
    made.receive = [](void* user, uint32_t from, spillway_channel channel, void* data, uint64_t bytes,
                      spillway_message* message) {
      auto& [pipes, self] = *static_cast<Member*>(user);
      return pipes->roads_.at({from, self, channel})->receive(data, bytes, message), 0;
    };
    made.close = [](void* user, spillway_parting) {
      auto& [pipes, self] = *static_cast<Member*>(user);
      for (auto& [between, road] : pipes->roads_) {
        if (std::get<0>(between) == self) road->end_sends();
        if (std::get<1>(between) == self) road->end_receives();
      }
    };
    return made;
  }

 private:
  struct Member {
    Pipes* pipes;
    uint32_t rank;
  };
  uint32_t ranks_ = 0;
  std::vector<Member> members_;
  std::map<std::tuple<uint32_t, uint32_t, spillway_channel>, std::unique_ptr<Road>> roads_;
};

inline void run_ranks_on_pipes(uint32_t ranks, const std::function<void(uint32_t, spillway_communicator*)>& body) {
  Pipes pipes(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const spillway_transport table = pipes.table(rank);
      spillway_communicator* communicator = nullptr;
      ASSERT_EQ(SPILLWAY_OK, spillway_communicator_create(&table, nullptr, &communicator)) << spillway_error_message();
      body(rank, communicator);
      EXPECT_EQ(SPILLWAY_OK, spillway_communicator_destroy(communicator)) << spillway_error_message();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace spillway::testing
