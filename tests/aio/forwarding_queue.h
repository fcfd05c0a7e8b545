// A queue whose calls go on to another one, for tests that hold some of them up or let them fail. Programs that are
// linked with `--wrap` give such a one to whoever calls IoQueue::create():
//
//   std::unique_ptr<IoQueue> real(const IoQueueOptions&, Files, Regions) __asm__("__real_" SPILLWAY_CREATE_QUEUE);
//   std::unique_ptr<IoQueue> ours(const IoQueueOptions&, Files, Regions) __asm__("__wrap_" SPILLWAY_CREATE_QUEUE);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "spillway/io_queue.h"

#define SPILLWAY_CREATE_QUEUE                                                                   \
  "_ZN8spillway7IoQueue6createERKNS_14IoQueueOptionsESt4spanIKPNS_4FileELm18446744073709551615" \
  "EES4_IKS4_ISt4byteLm18446744073709551615EELm18446744073709551615EE"

namespace spillway {

using Files = std::span<File* const>;
using Regions = std::span<const std::span<std::byte>>;

namespace testing {

class ForwardingQueue : public IoQueue {
 public:
  explicit ForwardingQueue(std::unique_ptr<IoQueue> to) : real_(std::move(to)) {}

  void submit(const IoRequest& request) override { real_->submit(request); }
  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) override {
    return real_->wait(out, timeout_seconds);
  }
  void wake() noexcept override { real_->wake(); }
  void cancel_waiting() override { real_->cancel_waiting(); }
  std::uint32_t add_file(File& file) override { return real_->add_file(file); }
  void remove_file(std::uint32_t index) override { real_->remove_file(index); }
  bool add_region(std::span<std::byte> region) override { return real_->add_region(region); }
  void remove_region(const std::byte* begin) override { real_->remove_region(begin); }
  std::uint32_t pending() const noexcept override { return real_->pending(); }
  IoStats stats() const noexcept override { return real_->stats(); }
  std::string describe() const override { return real_->describe(); }

 protected:
  const std::unique_ptr<IoQueue> real_;
};

}  // namespace testing
}  // namespace spillway
