// The engine of the API for C. A call of an engine is checked before it gets there: its handle, the thread, what else
// it names; and what the engine would take for a programmer's error is answered.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/devices.h"
#include "spillway/c_api.h"
#include "spillway/c_ranks.h"
#include "spillway/config.h"
#include "spillway/device.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/snapshot.h"
#include "spillway/stall.h"
#include "src/c/c_handles.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_NVME == static_cast<int>(Placement::kNvme));
static_assert(SPILLWAY_VALUES_GRADIENT == static_cast<int>(ParameterValues::kGradient));
static_assert(SPILLWAY_REPLACE == static_cast<int>(OnExisting::kReplace));
static_assert(SPILLWAY_STALL_OTHER == static_cast<int>(StallCause::kOther) && kStallNames.size() <= SPILLWAY_STALLS);
static_assert(SPILLWAY_STALL_NETWORK == static_cast<int>(StallCause::kNetwork));

namespace {

// It may have been destroyed while the call came in.
Engine& living(const EngineObject& object) {
  if (!object.engine) refuse("spillway_engine", "is no handle that lives", "its engine was destroyed");
  return *object.engine;
}

template <typename Body>
spillway_status with_engine(const char* call, const spillway_engine* handle, Body&& body) {
  return guarded([&] {
    const auto object = tables().engines.find(handle);
    const auto turn = object->caller.enter(call);
    body(living(*object), object);
  });
}

template <typename Value, typename Body>
Value ask_engine(const spillway_engine* handle, Value otherwise, Body&& body) {
  return answered(otherwise, [&] {
    const auto object = tables().engines.find(handle);
    const auto turn = object->caller.ask();
    return body(living(*object), *object);
  });
}

// The caller holds what is returned for as long as it uses the stream.
std::shared_ptr<StreamObject> find_stream(const std::shared_ptr<EngineObject>& engine, spillway_stream* handle) {
  if (handle == nullptr) return nullptr;
  auto stream = tables().streams.find(handle);
  if (stream->of != engine) refuse("spillway_stream", "belongs to another engine", "adopt it with this one");
  return stream;
}

template <typename Body>
spillway_status with_stream(const char* call, const spillway_engine* handle, spillway_stream* stream, Body&& body) {
  return with_engine(call, handle, [&](Engine& engine, const std::shared_ptr<EngineObject>& object) {
    const auto given_stream = find_stream(object, stream);
    body(engine, given_stream ? *given_stream->stream : engine.stream(), object);
  });
}

spillway_step_report report_of(const StepReport& done) {
  spillway_step_report report = {};
  report.step = done.step;
  report.durable_step = done.durable_step;
  report.gradient_norm = done.gradient_norm;
  report.learning_rate = done.learning_rate;
  report.seconds = done.seconds;
  report.stall_seconds = done.stall_seconds;
  report.link_percent = done.link_percent;
  report.loss_scale = done.loss_scale.value_or(1);
  report.skipped = done.skipped;
  report.taken_back = done.taken_back;
  report.nvme_read_bytes = done.nvme_read_bytes;
  report.nvme_write_bytes = done.nvme_write_bytes;
  report.h2d_bytes = done.h2d_bytes;
  report.d2h_bytes = done.d2h_bytes;
  report.unplanned_visits = done.unplanned_visits;
  done.link.copy(report.link, sizeof report.link - 1);
  report.adam_seconds = done.adam_seconds;
  report.visits = done.visits;
  report.visit_hits = done.visit_hits;
  report.tile_bytes = done.tile_bytes;
  report.tile_hit_bytes = done.tile_hit_bytes;
  report.speculative_blocks = done.speculative_blocks;
  std::ranges::copy(done.stalls.of, report.stalls);
  return report;
}

// What is left of an engine when it goes, in the order in which one refers to the other.
void end_engine(const std::shared_ptr<EngineObject>& object) {
  const auto belongs = [&](const auto& other) { return other.of == object; };
  for (const auto& lease : tables().leases.take_all(belongs)) lease->lease.reset();
  for (const auto& activation : tables().activations.take_all(belongs)) activation->lease.reset();
  const auto streams = tables().streams.take_all(belongs);
  object->engine.reset();
  for (const auto& stream : streams) stream->stream.reset();
  object->streams.clear();
  object->ranks.reset();
}

}  // namespace

SaveOptions spillway::c::read_save_options(const spillway_save_options* options) {
  const auto read = read_struct(options, "spillway_save_options");
  SaveOptions wanted{.replace = read.replace != 0};
  wanted.leave_out_frozen = read.leave_out_frozen != 0;
  if (read.max_file_bytes != 0) wanted.max_file_bytes = read.max_file_bytes;
  return wanted;
}

spillway_status spillway_engine_destroy(spillway_engine* engine) {
  return guarded([&] {
    if (engine == nullptr) return;
    const auto object = tables().engines.find(engine);
    const auto turn = object->caller.enter("spillway_engine_destroy");
    living(*object);
    tables().engines.take(engine);
    end_engine(object);
  });
}

uint64_t spillway_engine_current_step(const spillway_engine* engine) {
  return ask_engine(engine, uint64_t{0}, [](Engine& asked, auto&) { return asked.current_step(); });
}

double spillway_engine_loss_scale(const spillway_engine* engine) {
  return ask_engine(engine, static_cast<double>(NAN), [](Engine& asked, auto&) { return asked.loss_scale(); });
}

double spillway_engine_next_learning_rate(const spillway_engine* engine) {
  return ask_engine(engine, static_cast<double>(NAN), [](Engine& asked, auto&) { return asked.next_learning_rate(); });
}

spillway_device_kind spillway_engine_device(const spillway_engine* engine) {
  return ask_engine(engine, spillway_device_kind{-1},
                    [](Engine& asked, auto&) { return static_cast<spillway_device_kind>(asked.device_kind()); });
}

size_t spillway_engine_blob(const spillway_engine* engine, void* out, size_t capacity) {
  return ask_engine(engine, size_t{0}, [&](Engine& asked, auto&) { return copy_blob(asked.blob(), out, capacity); });
}

spillway_status spillway_engine_describe(const spillway_engine* engine, void (*line)(void*, const char*), void* user) {
  return with_engine(__func__, engine, [&](Engine& asked, auto&) { tell(asked.describe(), line, user); });
}

spillway_status spillway_engine_ledger(const spillway_engine* engine,
                                       void (*entry)(void*, spillway_tier, const char*, uint64_t), void* user) {
  return with_engine(__func__, engine, [&](Engine& asked, auto&) { tell(asked.ledger(), entry, user); });
}

uint64_t spillway_engine_budget(const spillway_engine* engine, spillway_tier tier) {
  return ask_engine(engine, uint64_t{0}, [&](Engine& asked, auto&) {
    const Ledger& ledger = asked.ledger();
    switch (checked(tier, Placement::kNvme, "spillway_tier")) {
      case Placement::kHbm: return ledger.hbm_budget;
      case Placement::kHost: return ledger.host_budget;
      default: return ledger.nvme_budget;
    }
  });
}

double spillway_engine_predicted_step_seconds(const spillway_engine* engine) {
  return ask_engine(engine, static_cast<double>(NAN),
                    [](Engine& asked, auto&) { return asked.predicted_step_seconds().value_or(0); });
}

spillway_status spillway_engine_import_weights(spillway_engine* engine, spillway_weight_source source, void* user) {
  return with_engine(__func__, engine, [&](Engine& called, auto&) {
    given(source, "source");
    called.import_weights([&](auto block, auto parameter, auto first, std::span<float> out) {
      require(source(user, block, parameter, first, out.data(), out.size()));
    });
  });
}

spillway_status spillway_engine_export_weights(spillway_engine* engine, int exact, spillway_weight_sink sink,
                                               void* user) {
  return with_engine(__func__, engine, [&](Engine& called, auto&) {
    given(sink, "sink");
    called.export_weights(exact != 0, [&](auto block, auto parameter, auto first, std::span<const float> in) {
      require(sink(user, block, parameter, first, in.data(), in.size()));
    });
  });
}

void* spillway_engine_workspace(spillway_engine* engine, uint64_t* bytes) {
  return ask_engine(engine, static_cast<void*>(nullptr), [&](Engine& asked, auto&) {
    const std::span<std::byte> workspace = asked.workspace();
    if (bytes != nullptr) *bytes = workspace.size();
    return static_cast<void*>(workspace.data());
  });
}

void* spillway_engine_insides(spillway_engine* engine, uint32_t block, uint64_t* bytes, int32_t* kept) {
  return ask_engine(engine, static_cast<void*>(nullptr), [&](Engine& asked, const EngineObject& object) {
    if (block >= object.description.blocks.size()) {
      refuse("spillway_engine_insides", "there is no block " + std::to_string(block));
    }
    const Insides insides = asked.insides(block);
    if (bytes != nullptr) *bytes = insides.memory.size();
    if (kept != nullptr) *kept = insides.kept;
    return static_cast<void*>(insides.memory.data());
  });
}

int spillway_engine_in_hbm(const spillway_engine* engine, const void* data, size_t bytes) {
  return ask_engine(engine, 0, [&](Engine& asked, auto&) { return static_cast<int>(asked.in_hbm(data, bytes)); });
}

spillway_status spillway_engine_adopt_stream(spillway_engine* engine, void* native, spillway_stream** stream) {
  return with_engine(__func__, engine, [&](Engine& called, const auto& object) {
    given(stream, "stream");
    *stream = tables().streams.add(made_of<StreamObject>(object, called.adopt_stream(native)));
  });
}

spillway_status spillway_stream_synchronize(spillway_engine* engine, spillway_stream* stream) {
  return with_stream(__func__, engine, stream, [](Engine&, Stream& on, auto&) { on.synchronize(); });
}

void* spillway_stream_native(spillway_engine* engine, spillway_stream* stream) {
  void* native = nullptr;
  with_stream(__func__, engine, stream, [&](Engine&, Stream& on, auto&) { native = on.native(); });
  return native;
}

spillway_status spillway_stream_launch(spillway_engine* engine, spillway_stream* stream,
                                       void (*work)(void*, spillway_workers*), void* user) {
  return with_stream(__func__, engine, stream, [&](Engine&, Stream& on, auto&) {
    given(work, "work");
    if (const DeviceType& device = device_of(on.kind()); !device.on_cpu) {
      throw Error(Code::kUnsupported, {"spillway_stream_launch", "the engine's device is " + std::string(device.name),
                                       0, "launch a kernel on spillway_stream_native()"});
    }
    on.launch([work, user](HostWorkers& workers) { work(user, reinterpret_cast<spillway_workers*>(&workers)); });
  });
}

spillway_status spillway_workers_parallel_for(spillway_workers* workers, size_t count,
                                              void (*body)(void* user, size_t index), void* user) {
  return guarded([&] {
    given(body, "body");
    reinterpret_cast<HostWorkers*>(given(workers, "spillway_workers"))
        ->parallel_for(count, [body, user](std::size_t index) { body(user, index); });
  });
}

uint32_t spillway_workers_threads(const spillway_workers* workers) {
  return answered(uint32_t{0}, [&] {
    return uint32_t{reinterpret_cast<const HostWorkers*>(given(workers, "spillway_workers"))->threads()};
  });
}

spillway_status spillway_stream_destroy(spillway_stream* stream) {
  return guarded([&] {
    if (stream == nullptr) return;
    const auto object = tables().streams.take(stream);
    const auto turn = object->of->caller.wait();
    if (object->of->engine) object->of->streams.push_back(std::move(object->stream));
  });
}

spillway_status spillway_engine_acquire(spillway_engine* engine, uint32_t block, spillway_pass pass,
                                        spillway_stream* stream, spillway_lease** lease) {
  return with_stream(__func__, engine, stream, [&](Engine& called, Stream& on, const auto& object) {
    given(lease, "lease");
    const Pass checked_pass = checked(pass, Pass::kBackward, "spillway_pass");
    *lease = tables().leases.add(made_of<LeaseObject>(object, block, called.acquire(block, checked_pass, on)));
  });
}

const void* spillway_lease_weight(const spillway_lease* lease, uint32_t parameter) {
  return answered(static_cast<const void*>(nullptr), [&] {
    const auto object = tables().leases.find(lease);
    const auto turn = object->of->caller.ask();
    const Block& block = object->of->description.blocks[object->block];
    if (!object->lease) refuse("spillway_lease", "is no handle that lives", "its engine was destroyed");
    if (parameter >= block.parameters.size()) {
      refuse("block " + block.name, "there is no parameter " + std::to_string(parameter));
    }
    return object->lease->weight(parameter);
  });
}

spillway_status spillway_lease_release(spillway_lease* lease) {
  return guarded([&] {
    if (lease == nullptr) return;
    const auto object = tables().leases.find(lease);
    const auto turn = object->of->caller.wait();
    tables().leases.take(lease);  // its engine may have gone with it meanwhile
    object->lease.reset();
  });
}

spillway_status spillway_engine_acquire_activation(spillway_engine* engine, uint32_t activation, spillway_access access,
                                                   spillway_stream* stream, spillway_activation** acquired) {
  return with_stream(__func__, engine, stream, [&](Engine& called, Stream& on, const auto& object) {
    given(acquired, "acquired");
    const Access way = checked(access, Access::kUpdate, "spillway_access");
    *acquired =
        tables().activations.add(made_of<ActivationObject>(object, called.acquire_activation(activation, way, on)));
  });
}

void* spillway_activation_data(const spillway_activation* activation) {
  return answered(static_cast<void*>(nullptr), [&] {
    const auto object = tables().activations.find(activation);
    const auto turn = object->of->caller.ask();
    if (!object->lease) refuse("spillway_activation", "is no handle that lives", "its engine was destroyed");
    return static_cast<void*>(object->lease->data());
  });
}

spillway_status spillway_activation_release(spillway_activation* activation) {
  return guarded([&] {
    if (activation == nullptr) return;
    const auto object = tables().activations.find(activation);
    const auto turn = object->of->caller.wait();
    tables().activations.take(activation);
    object->lease.reset();
  });
}

spillway_status spillway_engine_push_gradient(spillway_engine* engine, uint32_t block, uint32_t parameter,
                                              const void* data, uint64_t elements, spillway_dtype dtype,
                                              spillway_stream* stream) {
  return spillway_engine_push_gradient_of(engine, 0, block, parameter, data, elements, dtype, stream);
}

spillway_status spillway_engine_push_gradient_of(spillway_engine* engine, uint32_t micro_batch, uint32_t block,
                                                 uint32_t parameter, const void* data, uint64_t elements,
                                                 spillway_dtype dtype, spillway_stream* stream) {
  return with_stream("spillway_engine_push_gradient", engine, stream, [&](Engine& called, Stream& on, auto&) {
    called.push_gradient({.block = block,
                          .parameter = parameter,
                          .data = data,
                          .dtype = dtype_of(dtype),
                          .elements = elements,
                          .micro_batch = micro_batch},
                         on);
  });
}

spillway_status spillway_engine_set_learning_rate(spillway_engine* engine, double rate) {
  return with_engine(__func__, engine, [&](Engine& called, auto&) { called.set_learning_rate(rate); });
}

spillway_status spillway_engine_set_betas(spillway_engine* engine, double beta1, double beta2) {
  return with_engine("spillway_engine_set_betas", engine,
                     [&](Engine& called, auto&) { called.set_betas(beta1, beta2); });
}

spillway_status spillway_engine_step(spillway_engine* engine, const void* blob, size_t bytes,
                                     spillway_step_report* report) {
  return with_engine(__func__, engine, [&](Engine& called, const auto& object) {
    check_struct(report, "spillway_step_report");
    if (bytes > 0) given(blob, "blob");
    write_struct(report, report_of(called.step({static_cast<const std::byte*>(blob), bytes})));
    object->streams.clear();  // nothing names any more what was given back inside the step
  });
}

spillway_status spillway_engine_discard_step(spillway_engine* engine) {
  return with_engine(__func__, engine, [](Engine& called, const auto& object) {
    called.discard_step();
    object->streams.clear();
  });
}

spillway_status spillway_engine_flush(spillway_engine* engine) {
  return with_engine(__func__, engine, [](Engine& called, auto&) { called.flush(); });
}

spillway_status spillway_engine_save(spillway_engine* engine, const char* directory,
                                     const spillway_save_options* options) {
  return with_engine(__func__, engine, [&](Engine& called, auto&) {
    called.save(given(directory, "directory"), read_save_options(options));
  });
}

spillway_status spillway_engine_begin_save(spillway_engine* engine, const char* directory,
                                           const spillway_save_options* options) {
  return with_engine(__func__, engine, [&](Engine& called, auto&) {
    called.begin_save(given(directory, "directory"), read_save_options(options));
  });
}

spillway_status spillway_engine_finish_save(spillway_engine* engine) {
  return with_engine(__func__, engine, [](Engine& called, auto&) { called.finish_save(); });
}

spillway_status spillway_engine_load_snapshot(spillway_engine* engine, const char* directory) {
  return with_engine(__func__, engine, [&](Engine& called, const auto& object) {
    called.load_snapshot(given(directory, "directory"));
    object->streams.clear();
  });
}

spillway_status spillway_engine_read_values(spillway_engine* engine, spillway_parameter_values of, uint32_t block,
                                            uint32_t parameter, spillway_weight_sink sink, void* user) {
  return with_engine("spillway_engine_read_values", engine, [&](Engine& called, auto&) {
    given(sink, "sink");
    called.read_values(checked(of, ParameterValues::kGradient, "spillway_parameter_values"), block, parameter,
                       [&](auto b, auto p, auto first, std::span<const float> in) {
                         require(sink(user, b, p, first, in.data(), in.size()));
                       });
  });
}

spillway_status spillway_engine_write_values(spillway_engine* engine, spillway_parameter_values of, uint32_t block,
                                             uint32_t parameter, const float* values, uint64_t count, uint32_t from) {
  return with_engine("spillway_engine_write_values", engine, [&](Engine& called, auto&) {
    called.write_values(checked(of, ParameterValues::kGradient, "spillway_parameter_values"), block, parameter,
                        {values, values == nullptr ? 0 : count}, from);
  });
}

spillway_status spillway_engine_export(spillway_engine* engine, const char* directory,
                                       const spillway_export_options* options) {
  return with_engine(__func__, engine, [&](Engine& called, const auto& object) {
    given(directory, "directory");
    const ExportOptions wanted = read_export_options(options);
    if (!object->ranks || object->ranks->communicator->ranks() == 1) {
      return export_model(called, object->description, directory, wanted);
    }
    export_of_ranks(called, *object, directory, wanted);
  });
}
