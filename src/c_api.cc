#include "spillway/c_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/import.h"
#include "spillway/log.h"
#include "src/config/reader.h"

using namespace spillway;

struct spillway_config {
  explicit spillway_config(const EffectiveConfig& effective)
      : config(effective.config), settings(settings_json(effective)) {}
  Config config;
  std::string settings;
};

struct spillway_model {
  ModelDescription description;
};

struct spillway_engine {
  ModelDescription description;
  std::unique_ptr<Engine> engine;
};

struct spillway_stream {
  std::unique_ptr<Stream> stream;
};

struct spillway_lease {
  Lease lease;
};

namespace {

static_assert(SPILLWAY_DEVICE == static_cast<int32_t>(Code::kDevice) + 1);
static_assert(SPILLWAY_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(SPILLWAY_NVME == static_cast<int>(Placement::kNvme));
static_assert(SPILLWAY_BACKWARD == static_cast<int>(Pass::kBackward));
static_assert(SPILLWAY_DEVICE_CUDA == static_cast<int>(DeviceKind::kCuda));
static_assert(SPILLWAY_REPLACE == static_cast<int>(OnExisting::kReplace));

static_assert(SPILLWAY_REMEDY_REOPEN + 1 == static_cast<int>(kRemedies));

thread_local std::string last_message, last_message_in;
thread_local std::optional<Error> last_error;  // of Spillway's

// Runs `body`, and keeps what it throws.
template <typename Body>
spillway_status guarded(Body&& body) noexcept {
  try {
    body();
    return SPILLWAY_OK;
  } catch (const Error& error) {
    last_message = error.what();
    last_error = error;
    return static_cast<spillway_status>(static_cast<int>(error.code()) + 1);
  } catch (const std::exception& error) {
    last_message = error.what();
    last_error.reset();
  } catch (...) {
    last_error.reset();
    last_message = "an exception that is not std::exception came out of a function of the caller's";
  }
  return SPILLWAY_UNEXPECTED;
}

// What a caller must give.
template <typename Pointer>
Pointer given(Pointer pointer, const char* what) {
  if (pointer == nullptr) throw Error(Code::kInvalidArgument, {what, "is null", 0, ""});
  return pointer;
}

// A caller can write any number for a value of an enumeration.
template <typename To>
To checked(int32_t value, To last, const char* what) {
  if (value < 0 || value > static_cast<int32_t>(last)) {
    throw Error(Code::kInvalidArgument, {what, "no such value: " + std::to_string(value), 0, ""});
  }
  return static_cast<To>(value);
}

DType dtype_of(spillway_dtype type) { return checked(type, DType::kFloat16, "spillway_dtype"); }

void require(int returned) {
  if (returned != 0) {
    throw Error(Code::kInvalidArgument, {"weights", "the caller's function failed with " + std::to_string(returned), 0,
                                         "its own message says why"});
  }
}

Stream& stream_of(spillway_engine* engine, spillway_stream* stream) {
  return stream != nullptr ? *stream->stream : engine->engine->stream();
}

}  // namespace

const char* spillway_version(void) { return SPILLWAY_VERSION; }

const char* spillway_error_message(void) { return last_message.c_str(); }

spillway_remedy spillway_error_remedy(void) {
  return last_error ? static_cast<spillway_remedy>(last_error->parts().remedy) : SPILLWAY_REMEDY_NONE;
}

const char* spillway_error_remedy_value(uint32_t index) {
  if (!last_error || index >= last_error->parts().values.size()) return nullptr;
  return last_error->parts().values[index].c_str();
}

const char* spillway_error_message_in(const char* words) {
  if (!last_error || words == nullptr) return last_message.c_str();
  last_message_in = last_error->message_in(words);
  return last_message_in.c_str();
}

void spillway_set_log(void (*sink)(void*, int, const char*), void* user) {
  if (sink == nullptr) return set_log_sink({});
  set_log_sink([sink, user](LogLevel level, std::string_view message) {
    sink(user, level == LogLevel::kWarning, std::string(message).c_str());
  });
}

spillway_status spillway_config_parse(const char* json, const char* name, spillway_config** config) {
  return guarded([&] {
    const ConfigText texts[] = {{given(json, "json"), given(name, "name")}};
    *config = new spillway_config(load_effective(texts, {}));
  });
}

spillway_status spillway_config_parse_with(const char* json, const char* name, const char* overlay,
                                           const char* overlay_name, spillway_config** config) {
  return guarded([&] {
    const ConfigText texts[] = {{given(json, "json"), given(name, "name")},
                                {given(overlay, "overlay"), given(overlay_name, "overlay_name")}};
    *config = new spillway_config(load_effective(texts, {}));
  });
}

spillway_dtype spillway_config_weights(const spillway_config* config) {
  return static_cast<spillway_dtype>(config->config.weights);
}

uint32_t spillway_config_micro_batch(const spillway_config* config) { return config->config.micro_batch; }

uint32_t spillway_config_gradient_accumulation(const spillway_config* config) {
  return config->config.gradient_accumulation;
}

const char* spillway_config_settings(const spillway_config* config) { return config->settings.c_str(); }

void spillway_config_destroy(spillway_config* config) { delete config; }

spillway_model* spillway_model_create(void) { return new spillway_model; }

spillway_status spillway_model_add_block(spillway_model* model, const char* name) {
  return guarded([&] { model->description.blocks.push_back({.name = given(name, "name"), .parameters = {}}); });
}

spillway_status spillway_model_add_parameter(spillway_model* model, uint32_t block, const char* name,
                                             const uint64_t* shape, size_t rank, int trainable, uint32_t pushes) {
  return guarded([&] {
    given(name, "name");
    if (rank > 0) given(shape, name);
    if (block >= model->description.blocks.size()) {
      throw Error(Code::kInvalidArgument, {name, "there is no block " + std::to_string(block), 0, "add it first"});
    }
    model->description.blocks[block].parameters.push_back(
        {.name = name, .shape = {shape, shape + rank}, .trainable = trainable != 0, .pushes = pushes});
  });
}

spillway_status spillway_model_add_visit(spillway_model* model, uint32_t block, spillway_pass pass) {
  return guarded([&] {
    model->description.visits.push_back({block, checked(pass, Pass::kBackward, "spillway_pass")});
  });
}

void spillway_model_set_workspace(spillway_model* model, uint64_t bytes) { model->description.workspace_bytes = bytes; }

spillway_status spillway_model_attach(spillway_model* model, const char* name, const char* text) {
  return guarded([&] { model->description.attachments.push_back({given(name, "name"), given(text, "text")}); });
}

void spillway_model_destroy(spillway_model* model) { delete model; }

spillway_status spillway_import_deepspeed(const char* directory, const spillway_model* model, const char* snapshot,
                                          const spillway_import_options* options,
                                          void (*facts)(void* user, const char* json), void* user) {
  return guarded([&] {
    ImportOptions wanted;
    if (options != nullptr) {
      if (options->tag != nullptr) wanted.tag = options->tag;
      if (options->weights != nullptr) wanted.weights = dtype_of(*options->weights);
      wanted.verify = options->unverified == 0;
      if (options->frozen != nullptr) {
        wanted.frozen = [options](auto block, auto parameter, auto first, std::span<float> out) {
          require(options->frozen(options->frozen_user, block, parameter, first, out.data(), out.size()));
        };
      }
    }
    const DeepSpeedFacts found =
        import_deepspeed(given(directory, "directory"), model->description, given(snapshot, "snapshot"), wanted);
    if (facts != nullptr) facts(user, facts_json(found, snapshot).c_str());
  });
}

spillway_status spillway_engine_create(const spillway_config* config, const spillway_model* model,
                                       const spillway_options* options, spillway_engine** engine) {
  return guarded([&] {
    EngineOptions wanted;
    if (options != nullptr) {
      wanted.on_existing = checked(options->on_existing, OnExisting::kReplace, "spillway_on_existing");
      if (options->snapshot != nullptr) wanted.snapshot = options->snapshot;
      if (options->trace != nullptr) wanted.trace = options->trace;
    }
    auto made = std::make_unique<spillway_engine>();
    made->description = model->description;
    made->engine = Engine::create(config->config, made->description, wanted);
    *engine = made.release();
  });
}

void spillway_engine_destroy(spillway_engine* engine) { delete engine; }

uint64_t spillway_engine_current_step(const spillway_engine* engine) { return engine->engine->current_step(); }

double spillway_engine_loss_scale(const spillway_engine* engine) { return engine->engine->loss_scale(); }

double spillway_engine_next_learning_rate(const spillway_engine* engine) {
  return engine->engine->next_learning_rate();
}

spillway_device_kind spillway_engine_device(const spillway_engine* engine) {
  return static_cast<spillway_device_kind>(engine->engine->device_kind());
}

size_t spillway_engine_blob(const spillway_engine* engine, void* out, size_t capacity) {
  const auto blob = engine->engine->blob();
  if (const std::size_t bytes = std::min(capacity, blob.size()); bytes > 0) std::memcpy(out, blob.data(), bytes);
  return blob.size();
}

void spillway_engine_describe(const spillway_engine* engine, void (*line)(void*, const char*), void* user) {
  for (const std::string& text : engine->engine->describe()) line(user, text.c_str());
}

void spillway_engine_ledger(const spillway_engine* engine, void (*entry)(void*, spillway_tier, const char*, uint64_t),
                            void* user) {
  for (const Reservation& each : engine->engine->ledger().reservations) {
    entry(user, static_cast<spillway_tier>(each.tier), each.purpose.c_str(), each.bytes);
  }
}

double spillway_engine_predicted_step_seconds(const spillway_engine* engine) {
  return engine->engine->predicted_step_seconds().value_or(0);
}

spillway_status spillway_engine_import_weights(spillway_engine* engine, spillway_weight_source source, void* user) {
  return guarded([&] {
    given(source, "source");
    engine->engine->import_weights([&](auto block, auto parameter, auto first, std::span<float> out) {
      require(source(user, block, parameter, first, out.data(), out.size()));
    });
  });
}

spillway_status spillway_engine_export_weights(spillway_engine* engine, int exact, spillway_weight_sink sink,
                                               void* user) {
  return guarded([&] {
    given(sink, "sink");
    engine->engine->export_weights(exact != 0, [&](auto block, auto parameter, auto first, std::span<const float> in) {
      require(sink(user, block, parameter, first, in.data(), in.size()));
    });
  });
}

void* spillway_engine_workspace(spillway_engine* engine, uint64_t* bytes) {
  const std::span<std::byte> workspace = engine->engine->workspace();
  if (bytes != nullptr) *bytes = workspace.size();
  return workspace.data();
}

spillway_status spillway_engine_adopt_stream(spillway_engine* engine, void* native, spillway_stream** stream) {
  return guarded([&] { *stream = new spillway_stream{engine->engine->adopt_stream(native)}; });
}

spillway_status spillway_stream_synchronize(spillway_engine* engine, spillway_stream* stream) {
  return guarded([&] { stream_of(engine, stream).synchronize(); });
}

void spillway_stream_destroy(spillway_stream* stream) { delete stream; }

spillway_status spillway_engine_acquire(spillway_engine* engine, uint32_t block, spillway_pass pass,
                                        spillway_stream* stream, spillway_lease** lease) {
  return guarded([&] {
    const Pass checked_pass = checked(pass, Pass::kBackward, "spillway_pass");
    *lease = new spillway_lease{engine->engine->acquire(block, checked_pass, stream_of(engine, stream))};
  });
}

const void* spillway_lease_weight(const spillway_lease* lease, uint32_t parameter) {
  return lease->lease.weight(parameter);
}

void spillway_lease_release(spillway_lease* lease) { delete lease; }

spillway_status spillway_engine_push_gradient(spillway_engine* engine, uint32_t block, uint32_t parameter,
                                              const void* data, spillway_dtype dtype, spillway_stream* stream) {
  return guarded([&] {
    engine->engine->push_gradient({.block = block, .parameter = parameter, .data = data, .dtype = dtype_of(dtype)},
                                  stream_of(engine, stream));
  });
}

spillway_status spillway_engine_set_learning_rate(spillway_engine* engine, double rate) {
  return guarded([&] { engine->engine->set_learning_rate(rate); });
}

spillway_status spillway_engine_step(spillway_engine* engine, const void* blob, size_t bytes,
                                     spillway_step_report* report) {
  return guarded([&] {
    const StepReport done = engine->engine->step({static_cast<const std::byte*>(blob), bytes});
    if (report == nullptr) return;
    *report = {.step = done.step,
               .durable_step = done.durable_step,
               .gradient_norm = done.gradient_norm,
               .learning_rate = done.learning_rate,
               .seconds = done.seconds,
               .stall_seconds = done.stall_seconds,
               .link_percent = done.link_percent,
               .loss_scale = done.loss_scale.value_or(1),
               .skipped = done.skipped,
               .nvme_read_bytes = done.nvme_read_bytes,
               .nvme_write_bytes = done.nvme_write_bytes,
               .h2d_bytes = done.h2d_bytes,
               .d2h_bytes = done.d2h_bytes,
               .unplanned_visits = done.unplanned_visits,
               .link = {}};
    done.link.copy(report->link, sizeof report->link - 1);
  });
}

spillway_status spillway_engine_discard_step(spillway_engine* engine) {
  return guarded([&] { engine->engine->discard_step(); });
}

spillway_status spillway_engine_flush(spillway_engine* engine) {
  return guarded([&] { engine->engine->flush(); });
}

spillway_status spillway_engine_save(spillway_engine* engine, const char* directory, int replace) {
  return guarded([&] { engine->engine->save(given(directory, "directory"), {.replace = replace != 0}); });
}

spillway_status spillway_engine_export(spillway_engine* engine, const char* directory, spillway_dtype dtype,
                                       int replace) {
  return guarded([&] {
    export_model(*engine->engine, engine->description, given(directory, "directory"),
                 {.type = dtype_of(dtype), .replace = replace != 0});
  });
}
