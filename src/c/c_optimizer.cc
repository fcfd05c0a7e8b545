// The optimizer of the API for C whose weights are the caller's.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/c_api.h"
#include "spillway/error.h"
#include "spillway/offload_optimizer.h"
#include "src/c/c_handles.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_EXP_AVG_SQ == static_cast<int>(OptimizerState::kExpAvgSq));
static_assert(sizeof(spillway_tensor) == sizeof(OptimizerTensor) &&
              offsetof(spillway_tensor, gradient) == offsetof(OptimizerTensor, gradient));

namespace {

// Calls check their own thread: the object may be asked from several.
template <typename Body>
spillway_status with_optimizer(const spillway_optimizer* handle, Body&& body) {
  return guarded([&] {
    const auto object = tables().optimizers.find(handle);
    body(*object->optimizer, *object);
  });
}

std::span<const OptimizerTensor> tensors_of(const spillway_tensor* tensors, size_t count) {
  if (count > 0) given(tensors, "tensors");
  return {reinterpret_cast<const OptimizerTensor*>(tensors), count};
}

OptimizerConfig group_of(const spillway_hyperparameters* given_group, OptimizerKind kind) {
  const auto read = read_struct(given(given_group, "spillway_hyperparameters"), "spillway_hyperparameters");
  OptimizerConfig group;
  group.kind = kind;
  group.learning_rate = read.learning_rate;
  group.beta1 = read.beta1;
  group.beta2 = read.beta2;
  group.epsilon = read.epsilon;
  group.weight_decay = read.weight_decay;
  group.momentum = read.momentum;
  group.dampening = read.dampening;
  group.decoupled_decay = read.decoupled_decay != 0;
  group.nesterov = read.nesterov != 0;
  return group;
}

// The caller's functions, which keep their own messages.
class CallersCarrier final : public TensorCarrier {
 public:
  explicit CallersCarrier(const spillway_tensor_carrier& functions) : functions_(functions) {
    given(functions.bring, "bring"), given(functions.give, "give");
    given(functions.wait, "wait"), given(functions.leaf_sums, "leaf_sums");
  }
  void bring(const CarriedPiece& piece) override { copy(functions_.bring, piece, "bring"); }
  void give(const CarriedPiece& piece) override { copy(functions_.give, piece, "give"); }
  void wait(std::uint32_t slot) override { check(functions_.wait(functions_.user, slot), "wait"); }
  void leaf_sums(std::uint32_t tensor, std::span<double> sums) override {
    check(functions_.leaf_sums(functions_.user, tensor, sums.data(), sums.size()), "leaf_sums");
  }

 private:
  void copy(int (*function)(void*, const spillway_carried_piece*), const CarriedPiece& piece, const char* name) {
    const spillway_carried_piece said = {piece.slot,  piece.tensor, piece.first,
                                         piece.count, piece.weight, piece.gradient};
    check(function(functions_.user, &said), name);
  }
  static void check(int returned, const char* name) {
    if (returned == 0) return;
    throw Error(Code::kDevice, {std::string("carrier: ") + name, "failed with " + std::to_string(returned), 0,
                                "its own message says why"});
  }

  const spillway_tensor_carrier functions_;
};

}  // namespace

spillway_status spillway_optimizer_create(const spillway_config* config, const spillway_model* model,
                                          const spillway_optimizer_options* options, spillway_optimizer** optimizer) {
  return guarded([&] {
    given(optimizer, "optimizer");
    const auto read = read_struct(options, "spillway_optimizer_options");
    OffloadOptimizerOptions wanted;
    wanted.on_existing = checked(read.on_existing, OnExisting::kReplace, "spillway_on_existing");
    wanted.keep_gradients = read.keep_gradients != 0;
    if (read.snapshot != nullptr) wanted.snapshot = read.snapshot;
    const auto settings = tables().configs.find(config);
    const auto described = tables().models.find(model);
    const auto made = std::make_shared<OptimizerObject>();
    if (read.carrier != nullptr) {
      made->carrier = std::make_unique<CallersCarrier>(read_struct(read.carrier, "spillway_tensor_carrier"));
      wanted.carrier = made->carrier.get();
      wanted.mostly_elsewhere = read.mostly_elsewhere != 0;
    }
    made->kind = settings->config.optimizer.kind;
    {
      const auto turn = described->caller.enter("spillway_optimizer_create");
      made->optimizer = OffloadOptimizer::create(settings->config, described->description, wanted);
    }
    *optimizer = tables().optimizers.add(made);
  });
}

// A call that is under way holds the object.
spillway_status spillway_optimizer_destroy(spillway_optimizer* optimizer) {
  return guarded([&] {
    if (optimizer != nullptr) tables().optimizers.take(optimizer);
  });
}

uint64_t spillway_optimizer_current_step(const spillway_optimizer* optimizer) {
  return answered(uint64_t{0}, [&] { return tables().optimizers.find(optimizer)->optimizer->current_step(); });
}

size_t spillway_optimizer_blob(const spillway_optimizer* optimizer, void* out, size_t capacity) {
  return answered(size_t{0},
                  [&] { return copy_blob(tables().optimizers.find(optimizer)->optimizer->blob(), out, capacity); });
}

spillway_status spillway_optimizer_set_blob(spillway_optimizer* optimizer, const void* blob, size_t bytes) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, auto&) {
    if (bytes > 0) given(blob, "blob");
    called.set_blob({static_cast<const std::byte*>(blob), bytes});
  });
}

spillway_status spillway_optimizer_describe(const spillway_optimizer* optimizer, void (*line)(void*, const char*),
                                            void* user) {
  return with_optimizer(optimizer, [&](const OffloadOptimizer& asked, auto&) { tell(asked.describe(), line, user); });
}

spillway_status spillway_optimizer_ledger(const spillway_optimizer* optimizer,
                                          void (*entry)(void*, spillway_tier, const char*, uint64_t), void* user) {
  return with_optimizer(optimizer, [&](const OffloadOptimizer& asked, auto&) { tell(asked.ledger(), entry, user); });
}

spillway_status spillway_optimizer_update_counts(const spillway_optimizer* optimizer, uint64_t* counts, size_t count) {
  return with_optimizer(optimizer, [&](const OffloadOptimizer& asked, auto&) {
    const std::vector<std::uint64_t> all = asked.update_counts();
    if (count != all.size())
      refuse("spillway_optimizer_update_counts", "there are " + std::to_string(all.size()) + " tensors");
    std::ranges::copy(all, given(counts, "counts"));
  });
}

spillway_status spillway_optimizer_import_weights(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                  size_t count) {
  return with_optimizer(optimizer,
                        [&](OffloadOptimizer& called, auto&) { called.import_weights(tensors_of(tensors, count)); });
}

spillway_status spillway_optimizer_load_weights(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                size_t count) {
  return with_optimizer(optimizer,
                        [&](OffloadOptimizer& called, auto&) { called.load_weights(tensors_of(tensors, count)); });
}

spillway_status spillway_optimizer_gradient_norm(spillway_optimizer* optimizer, const spillway_tensor* tensors,
                                                 size_t count, double* norm, uint32_t* first_nonfinite) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, auto&) {
    const GradientNorm result = called.gradient_norm(tensors_of(tensors, count));
    *given(norm, "norm") = result.norm;
    if (first_nonfinite != nullptr) *first_nonfinite = result.first_nonfinite.value_or(UINT32_MAX);
  });
}

spillway_status spillway_optimizer_make_step(spillway_optimizer* optimizer, const spillway_optimizer_step* step,
                                             spillway_optimizer_report* report) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, const OptimizerObject& object) {
    check_struct(report, "spillway_optimizer_report");
    const auto read = read_struct(given(step, "spillway_optimizer_step"), "spillway_optimizer_step");
    if (read.blob_bytes > 0) given(read.blob, "blob");
    if (read.group_count > 0) given(read.groups, "groups");
    if (read.count > 0) given(read.group_of, "group_of");
    std::vector<OptimizerConfig> groups;
    for (size_t g = 0; g < read.group_count; ++g) groups.push_back(group_of(read.groups[g], object.kind));
    const OptimizerStepReport done = called.step({.tensors = tensors_of(read.tensors, read.count),
                                                  .groups = groups,
                                                  .group_of = {read.group_of, read.count},
                                                  .gradient_scale = read.gradient_scale == 0 ? 1 : read.gradient_scale,
                                                  .finite = read.finite != 0,
                                                  .blob = {static_cast<const std::byte*>(read.blob), read.blob_bytes}});
    spillway_optimizer_report said = {};
    said.step = done.step;
    said.durable_step = done.durable_step;
    said.seconds = done.seconds;
    said.adam_seconds = done.adam_seconds;
    said.stall_seconds = done.stall_seconds;
    said.nvme_read_bytes = done.nvme_read_bytes;
    said.nvme_write_bytes = done.nvme_write_bytes;
    said.tile_bytes = done.tile_bytes;
    said.tile_hit_bytes = done.tile_hit_bytes;
    write_struct(report, said);
  });
}

void* spillway_optimizer_gradient_memory(spillway_optimizer* optimizer, uint32_t tensor, uint64_t* bytes) {
  return answered(static_cast<void*>(nullptr), [&] {
    const std::span<std::byte> memory = tables().optimizers.find(optimizer)->optimizer->gradient_memory(tensor);
    if (bytes != nullptr) *bytes = memory.size();
    return static_cast<void*>(memory.data());
  });
}

void* spillway_optimizer_staging(spillway_optimizer* optimizer, uint64_t* bytes) {
  return answered(static_cast<void*>(nullptr), [&] {
    const std::span<std::byte> memory = tables().optimizers.find(optimizer)->optimizer->staging();
    if (bytes != nullptr) *bytes = memory.size();
    return static_cast<void*>(memory.empty() ? nullptr : memory.data());
  });
}

spillway_status spillway_optimizer_export_state(spillway_optimizer* optimizer, spillway_optimizer_state state,
                                                const spillway_tensor* tensors, size_t count, spillway_state_sink sink,
                                                void* user) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, auto&) {
    given(sink, "sink");
    called.export_state(checked(state, OptimizerState::kExpAvgSq, "spillway_optimizer_state"),
                        tensors_of(tensors, count),
                        [&](std::uint32_t tensor, std::uint64_t first, std::span<const float> values) {
                          require(sink(user, tensor, first, values.data(), values.size()));
                        });
  });
}

spillway_status spillway_optimizer_import_state(spillway_optimizer* optimizer, uint64_t step,
                                                const uint64_t* update_counts, int32_t masters,
                                                const spillway_tensor* tensors, size_t count,
                                                spillway_state_source source, void* user) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, auto&) {
    given(source, "source");
    if (count > 0) given(update_counts, "update_counts");
    called.import_state(
        step, {update_counts, count}, masters != 0, tensors_of(tensors, count),
        [&](OptimizerState state, std::uint32_t tensor, std::uint64_t first, std::span<float> out) {
          require(source(user, static_cast<spillway_optimizer_state>(state), tensor, first, out.data(), out.size()));
        });
  });
}

spillway_status spillway_optimizer_save(spillway_optimizer* optimizer, const char* directory,
                                        const spillway_save_options* options, const spillway_tensor* tensors,
                                        size_t count) {
  return with_optimizer(optimizer, [&](OffloadOptimizer& called, auto&) {
    called.save(given(directory, "directory"), read_save_options(options), tensors_of(tensors, count));
  });
}
