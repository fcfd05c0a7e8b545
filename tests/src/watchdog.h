// Ends a test that hangs, with its name; after SPILLWAY_PATIENCE seconds, 180 when that is not set.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace spillway::testing {

class Watchdog {
 public:
  explicit Watchdog(std::uint64_t seed)
      : thread_([this, seed] {
          std::unique_lock lock(mutex_);
          const char* patience = std::getenv("SPILLWAY_PATIENCE");
          // Second by second, so that one that was stopped for a while has not hung.
          for (int left = patience ? std::atoi(patience) : 180; left > 0; --left) {
            if (done_.wait_for(lock, std::chrono::seconds(1), [this] { return over_; })) return;
          }
          std::fprintf(stderr, "SPILLWAY_CASE=%llu hangs\n", static_cast<unsigned long long>(seed));
          std::abort();
        }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    done_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace spillway::testing
