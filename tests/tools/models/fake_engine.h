// An engine for tests of the model and its operations: everything resident in one arena, work runs when it is launched,
// gradients are kept as they were pushed. No tiers, no optimizer.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/engine.h"
#include "spillway/fp16.h"
#include "spillway/units.h"

namespace spillway::models {

class FakeWorkers final : public HostWorkers {
 public:
  explicit FakeWorkers(unsigned threads) : threads_(threads) {}
  unsigned threads() const noexcept override { return threads_; }
  unsigned current_slot() const noexcept override { return slot(); }

  void parallel_for(std::size_t count, IndexBody body) override {
    std::atomic<std::size_t> next = 0;
    const auto work = [&](unsigned own_slot) {
      slot() = own_slot;
      // Highest index first: a body that leans on the order of indices shows.
      for (std::size_t i; (i = next.fetch_add(1)) < count;) body(count - 1 - i);
    };
    std::vector<std::thread> others;
    for (unsigned t = 1; t < threads_; ++t) others.emplace_back(work, t);
    work(0);
    for (auto& thread : others) thread.join();
  }

 private:
  static unsigned& slot() {
    thread_local unsigned slot = 0;
    return slot;
  }
  unsigned threads_;
};

class FakeStream final : public Stream {
 public:
  explicit FakeStream(unsigned threads) : workers_(threads) {}
  DeviceKind kind() const noexcept override { return DeviceKind::kHost; }
  void* native() const noexcept override { return nullptr; }
  void launch(const HostTask& task) override { task(workers_); }
  void synchronize() override {}

 private:
  FakeWorkers workers_;
};

class FakeEngine final : public Engine {
 public:
  FakeEngine(const ModelDescription& model, DType type, unsigned threads, std::size_t arena_bytes = 0,
             bool keep_insides = false)
      : type_(type), stream_(threads) {
    std::size_t bytes = align_up<std::uint64_t>(model.workspace_bytes, 4096) + arena_bytes;
    for (const auto& activation : model.activations) bytes += align_up<std::uint64_t>(activation.bytes, 4096);
    for (const auto& block : model.blocks) {
      bytes += align_up<std::uint64_t>(block.inside_bytes * model.micro_batches, 4096) + 4096;
      for (const auto& parameter : block.parameters) bytes += align_up<std::uint64_t>(elements(parameter) * 4, 2048);
    }
    arena_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, align_up<std::size_t>(bytes + 4096, 4096))));
    arena_bytes_ = bytes;
    workspace_ = {allocate(model.workspace_bytes, 4096), model.workspace_bytes};
    for (const auto& activation : model.activations) activations_.push_back(allocate(activation.bytes, 4096));
    for (const auto& block : model.blocks) {
      const std::size_t size = block.inside_bytes * (keep_insides ? model.micro_batches : 1);
      insides_.push_back({{allocate(size, 4096), size}, keep_insides});
    }
    activation_uses_ = model.activation_uses;
    // Whatever is read before it is written shows.
    std::memset(arena_.get(), 0xff, bytes);
    for (const auto& block : model.blocks) {
      auto& weights = weights_.emplace_back();
      auto& counts = counts_.emplace_back();
      for (const auto& parameter : block.parameters) {
        weights.push_back(allocate(elements(parameter) * size_of(type), 2048));
        counts.push_back(elements(parameter));
      }
    }
  }

  static std::uint64_t elements(const Parameter& parameter) {
    std::uint64_t count = 1;
    for (const auto extent : parameter.shape) count *= extent;
    return count;
  }

  static float widened(const void* data, std::size_t i, DType type) {
    if (type == DType::kFloat32) return static_cast<const float*>(data)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
    return type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
  }
  static float rounded(float value, DType type) {
    return type == DType::kFloat32   ? value
           : type == DType::kFloat16 ? fp16_to_float(float_to_fp16(value))
                                     : bf16_to_float(float_to_bf16(value));
  }
  static void put(void* data, std::size_t i, DType type, float value) {
    if (type == DType::kFloat32)
      static_cast<float*>(data)[i] = value;
    else
      static_cast<std::uint16_t*>(data)[i] = type == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  }

  double scale = 1;  // of the loss

  // A piece of the arena.
  std::byte* allocate(std::size_t bytes, std::size_t alignment = 64) {
    used_ = align_up(used_, alignment);
    SPILLWAY_CHECK(used_ + bytes <= arena_bytes_, "the test asked for a larger arena");
    std::byte* piece = arena_.get() + used_;
    used_ += bytes;
    return piece;
  }

  void* weight(std::uint32_t block, std::uint32_t parameter) { return weights_[block][parameter]; }
  std::vector<float> gradient(std::uint32_t block, std::uint32_t parameter) const {
    return gradients_.at({block, parameter});
  }
  // (block, pass) of every acquire.
  const std::vector<std::pair<std::uint32_t, Pass>>& visits() const { return visits_; }
  unsigned pushes(std::uint32_t block, std::uint32_t parameter) const { return pushes_.at({block, parameter}); }
  // By block, parameter and micro-batch: what was pushed of it, in that order.
  using Pushed = std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::vector<std::vector<float>>>;
  const Pushed& pushed() const { return pushed_; }
  int open_leases() const { return open_leases_; }
  int discarded() const { return discarded_; }  // steps

  std::uint64_t current_step() const override { return step_; }
  double loss_scale() const override { return scale; }
  double next_learning_rate() const override { return 0; }
  std::vector<std::byte> blob() const override { return {}; }
  void set_learning_rate(double) override {}
  void set_betas(double, double) override {}
  const Ledger& ledger() const override { return ledger_; }
  std::vector<std::string> describe() const override { return {}; }
  std::optional<double> predicted_step_seconds() const override { return std::nullopt; }
  DeviceKind device_kind() const override { return DeviceKind::kHost; }
  Stream& stream() override { return stream_; }
  std::unique_ptr<Stream> adopt_stream(void*) override {
    SPILLWAY_CHECK(false, "this engine has a stream of its own");
    return nullptr;
  }
  std::span<std::byte> workspace() override { return workspace_; }
  bool in_hbm(const void* data, std::size_t bytes) const override {
    const auto* begin = static_cast<const std::byte*>(data);
    return begin >= arena_.get() && begin + bytes <= arena_.get() + arena_bytes_;
  }
  void import_weights(const WeightSource& source) override {
    for (std::uint32_t b = 0; b < weights_.size(); ++b) {
      for (std::uint32_t p = 0; p < weights_[b].size(); ++p) {
        std::vector<float> values(counts_[b][p]);
        source(b, p, 0, values);
        set_weight(b, p, values);
      }
    }
  }
  void set_weight(std::uint32_t block, std::uint32_t parameter, const std::vector<float>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) put(weights_[block][parameter], i, type_, values[i]);
  }
  Lease acquire(std::uint32_t block, Pass pass, Stream& stream) override {
    visits_.emplace_back(block, pass);
    ++open_leases_;
    return make_lease(block, stream);
  }
  // Uses come as they were described, and may begin again.
  ActivationLease acquire_activation(std::uint32_t activation, Access access, Stream& stream) override {
    const auto is = [&](std::size_t index) {
      const ActivationUse& use = activation_uses_.at(index % activation_uses_.size());
      return use.activation == activation && use.access == access;
    };
    if (!is(next_use_)) next_use_ = 0;
    SPILLWAY_CHECK(is(next_use_), "uses follow the description");
    ++next_use_;
    ++open_leases_;
    return make_activation_lease(activation, activations_[activation], stream);
  }
  Insides insides(std::uint32_t block) override { return insides_[block]; }
  void push_gradient(const Gradient& gradient, Stream&) override {
    const std::pair key(gradient.block, gradient.parameter);
    const std::size_t count = counts_[gradient.block][gradient.parameter];
    auto& sum = gradients_[key];
    sum.resize(count);
    auto& values = pushed_[{gradient.block, gradient.parameter, gradient.micro_batch}].emplace_back(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = widened(gradient.data, i, gradient.dtype);
      sum[i] += values[i];
    }
    ++pushes_[key];
  }
  StepReport step(std::span<const std::byte>) override {
    gradients_.clear();
    pushes_.clear();
    pushed_.clear();
    StepReport report;
    report.step = ++step_;
    return report;
  }
  void set_micro_batches(std::uint32_t) override {}
  void discard_step() override {
    SPILLWAY_CHECK(open_leases_ == 0, "a lease is still held");
    next_use_ = 0;
    ++discarded_;
  }
  void flush() override {}
  void begin_save(const std::filesystem::path&, const SaveOptions&) override {
    SPILLWAY_CHECK(false, "nothing is saved");
  }
  void finish_save() override {}
  void load_snapshot(const std::filesystem::path&) override {}
  void read_values(ParameterValues, std::uint32_t, std::uint32_t, const WeightSink&) override {}
  void write_values(ParameterValues, std::uint32_t, std::uint32_t, std::span<const float>, std::uint32_t) override {}
  void export_weights(bool, const WeightSink& sink) override {
    for (std::uint32_t b = 0; b < weights_.size(); ++b) {
      for (std::uint32_t p = 0; p < weights_[b].size(); ++p) {
        std::vector<float> values(counts_[b][p]);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = widened(weights_[b][p], i, type_);
        sink(b, p, 0, values);
      }
    }
  }

 protected:
  const void* weight_address(std::uint32_t lease, std::uint32_t parameter) const override {
    return weights_[lease][parameter];
  }
  void release(std::uint32_t, Stream&) override { --open_leases_; }
  void release_activation(std::uint32_t, Stream&) override { --open_leases_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  DType type_;
  FakeStream stream_;
  std::unique_ptr<std::byte, Free> arena_;
  std::size_t arena_bytes_ = 0, used_ = 0;
  std::span<std::byte> workspace_;
  std::vector<std::vector<std::byte*>> weights_;
  std::vector<std::vector<std::size_t>> counts_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<float>> gradients_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, unsigned> pushes_;
  Pushed pushed_;
  std::vector<std::byte*> activations_;
  std::vector<Insides> insides_;
  std::vector<ActivationUse> activation_uses_;
  std::size_t next_use_ = 0;
  std::vector<std::pair<std::uint32_t, Pass>> visits_;
  int open_leases_ = 0, discarded_ = 0;
  std::uint64_t step_ = 0;
  Ledger ledger_;
};

}  // namespace spillway::models
