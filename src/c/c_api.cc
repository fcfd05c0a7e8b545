#include "spillway/c_api.h"

#include <cmath>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/c_ranks.h"
#include "spillway/config.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/import.h"
#include "spillway/log.h"
#include "spillway/snapshot.h"
#include "src/c/c_handles.h"
#include "src/config/reader.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(SPILLWAY_BACKWARD == static_cast<int>(Pass::kBackward));
static_assert(SPILLWAY_UPDATE == static_cast<int>(Access::kUpdate));
static_assert(SPILLWAY_DEVICE_CUDA == static_cast<int>(DeviceKind::kCuda));

namespace {

// Of a model, by one thread at a time.
template <typename Body>
spillway_status with_model(const char* call, spillway_model* handle, Body&& body) {
  return guarded([&] {
    const auto model = tables().models.find(handle);
    const auto turn = model->caller.enter(call);
    body(model->description);
  });
}

Block& block_of(ModelDescription& model, uint32_t block, const char* what) {
  if (block >= model.blocks.size()) refuse(what, "there is no block " + std::to_string(block), "add it first");
  return model.blocks[block];
}

}  // namespace

namespace spillway::c {

Tables& tables() {
  static Tables& all = *new Tables;
  return all;
}

ExportOptions read_export_options(const spillway_export_options* options) {
  const auto read = read_struct(options, "spillway_export_options");
  ExportOptions wanted{.type = dtype_of(read.dtype), .replace = read.replace != 0};
  if (read.max_file_bytes != 0) wanted.max_file_bytes = read.max_file_bytes;
  return wanted;
}

}  // namespace spillway::c

spillway_status spillway_config_parse(const char* json, const char* name, spillway_config** config) {
  return spillway_config_parse_with(json, name, nullptr, nullptr, nullptr, config);
}

spillway_status spillway_config_parse_with(const char* json, const char* name, const char* overlay,
                                           const char* overlay_name, const spillway_auto_values* automatic,
                                           spillway_config** config) {
  return spillway_config_parse_for(1, json, name, overlay, overlay_name, automatic, config);
}

spillway_status spillway_config_parse_for(uint32_t ranks, const char* json, const char* name, const char* overlay,
                                          const char* overlay_name, const spillway_auto_values* automatic,
                                          spillway_config** config) {
  return guarded([&] {
    if (ranks == 0) refuse("ranks", "is 0", "this process is one");
    given(config, "config");
    std::vector<ConfigText> texts = {{given(json, "json"), given(name, "name")}};
    if (overlay != nullptr) texts.push_back({overlay, given(overlay_name, "overlay_name")});
    const auto read = read_struct(automatic, "spillway_auto_values");
    AutoValues values;
    if (read.hidden_size != 0) values.hidden_size = read.hidden_size;
    if (read.total_steps != 0) values.total_steps = read.total_steps;
    const EffectiveConfig effective = load_effective(texts, values, ranks);
    *config = tables().configs.add(made_of<ConfigObject>(effective.config, settings_json(effective)));
  });
}

spillway_dtype spillway_config_weights(const spillway_config* config) {
  return answered(spillway_dtype{-1},
                  [&] { return static_cast<spillway_dtype>(tables().configs.find(config)->config.weights); });
}

uint32_t spillway_config_micro_batch(const spillway_config* config) {
  return answered(uint32_t{0}, [&] { return tables().configs.find(config)->config.micro_batch; });
}

uint32_t spillway_config_gradient_accumulation(const spillway_config* config) {
  return answered(uint32_t{0}, [&] { return tables().configs.find(config)->config.gradient_accumulation; });
}

const char* spillway_config_settings(const spillway_config* config) {
  return answered(static_cast<const char*>(nullptr), [&] { return tables().configs.find(config)->settings.c_str(); });
}

double spillway_config_learning_rate(const spillway_config* config, uint64_t step) {
  return answered(static_cast<double>(NAN), [&] { return learning_rate(tables().configs.find(config)->config, step); });
}

spillway_status spillway_config_device(const spillway_config* config, spillway_device_kind* device) {
  return guarded([&] {
    *given(device, "device") = static_cast<spillway_device_kind>(resolve_device(tables().configs.find(config)->config));
  });
}

uint32_t spillway_config_threads(const spillway_config* config) {
  return answered(uint32_t{0}, [&] { return uint32_t{compute_threads(tables().configs.find(config)->config)}; });
}

spillway_status spillway_config_destroy(spillway_config* config) {
  return guarded([&] {
    if (config != nullptr) tables().configs.take(config);
  });
}

spillway_model* spillway_model_create(void) {
  return answered(static_cast<spillway_model*>(nullptr),
                  [&] { return tables().models.add(std::make_shared<ModelObject>()); });
}

spillway_status spillway_model_add_block(spillway_model* model, const char* name) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    description.blocks.push_back({.name = given(name, "name"), .parameters = {}});
  });
}

spillway_status spillway_model_add_parameter(spillway_model* model, uint32_t block, const char* name,
                                             const uint64_t* shape, size_t rank, int trainable, uint32_t pushes) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    given(name, "name");
    if (rank > 0) given(shape, name);
    if (rank > 64) refuse(name, "has a rank of " + std::to_string(rank), "no tensor has more than 64 extents");
    block_of(description, block, name)
        .parameters.push_back(
            {.name = name, .shape = {shape, shape + rank}, .trainable = trainable != 0, .pushes = pushes});
  });
}

spillway_status spillway_model_add_bytes(spillway_model* model, uint32_t block, const char* name, uint64_t elements) {
  return with_model("spillway_model_add_bytes", model, [&](ModelDescription& description) {
    given(name, "name");
    block_of(description, block, name)
        .parameters.push_back({.name = name, .shape = {elements}, .trainable = false, .bytes = true});
  });
}

spillway_status spillway_model_add_visit(spillway_model* model, uint32_t block, spillway_pass pass) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    description.visits.push_back({block, checked(pass, Pass::kBackward, "spillway_pass")});
  });
}

spillway_status spillway_model_set_kept(spillway_model* model, uint64_t host, uint64_t nvme, uint64_t moving) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    description.kept_host_bytes = host;
    description.kept_nvme_bytes = nvme;
    description.kept_moving_bytes = moving;
  });
}

spillway_status spillway_model_set_workspace(spillway_model* model, uint64_t bytes) {
  return with_model(__func__, model, [&](ModelDescription& description) { description.workspace_bytes = bytes; });
}

spillway_status spillway_model_set_insides(spillway_model* model, uint32_t block, uint64_t bytes) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    block_of(description, block, "spillway_model_set_insides").inside_bytes = bytes;
  });
}

spillway_status spillway_model_set_micro_batches(spillway_model* model, uint32_t micro_batches) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    if (micro_batches == 0) refuse("micro_batches", "is 0", "a step has at least one");
    description.micro_batches = micro_batches;
  });
}

spillway_status spillway_model_add_activation(spillway_model* model, uint64_t bytes) {
  return with_model(__func__, model,
                    [&](ModelDescription& description) { description.activations.push_back({bytes}); });
}

spillway_status spillway_model_add_activation_use(spillway_model* model, uint32_t activation, spillway_access access,
                                                  uint32_t visit) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    description.activation_uses.push_back({activation, checked(access, Access::kUpdate, "spillway_access"), visit});
  });
}

spillway_status spillway_model_set_activations_held(spillway_model* model, uint32_t held) {
  return with_model(__func__, model, [&](ModelDescription& description) { description.activations_held = held; });
}

spillway_status spillway_model_accept_dtype(spillway_model* model, spillway_dtype dtype) {
  return with_model(__func__, model,
                    [&](ModelDescription& description) { description.weight_types.push_back(dtype_of(dtype)); });
}

spillway_status spillway_model_attach(spillway_model* model, const char* name, const char* text) {
  return with_model(__func__, model, [&](ModelDescription& description) {
    description.attachments.push_back({given(name, "name"), given(text, "text")});
  });
}

spillway_status spillway_model_destroy(spillway_model* model) {
  return guarded([&] {
    if (model != nullptr) tables().models.take(model);
  });
}

spillway_status spillway_import_deepspeed(const char* directory, const spillway_model* model, const char* snapshot,
                                          const spillway_import_options* options,
                                          void (*facts)(void* user, const char* json), void* user) {
  return guarded([&] {
    const auto read = read_struct(options, "spillway_import_options");
    ImportOptions wanted;
    if (read.tag != nullptr) wanted.tag = read.tag;
    if (read.weights != nullptr) wanted.weights = dtype_of(*read.weights);
    wanted.verify = read.unverified == 0;
    if (read.max_file_bytes != 0) wanted.max_file_bytes = read.max_file_bytes;
    if (read.progress != nullptr) {
      wanted.progress = [&read](uint64_t done, uint64_t bytes) { read.progress(read.progress_user, done, bytes); };
    }
    if (read.frozen != nullptr) {
      wanted.frozen = [&read](auto block, auto parameter, auto first, std::span<float> out) {
        require(read.frozen(read.frozen_user, block, parameter, first, out.data(), out.size()));
      };
    }
    const auto described = tables().models.find(model);
    const auto turn = described->caller.enter("spillway_import_deepspeed");
    const DeepSpeedInfo found =
        import_deepspeed(given(directory, "directory"), described->description, given(snapshot, "snapshot"), wanted);
    if (facts != nullptr) facts(user, info_json(found, snapshot).c_str());
  });
}

spillway_status spillway_find_snapshot(const char* directory, spillway_snapshot_info* facts) {
  return guarded([&] {
    check_struct(facts, "spillway_snapshot_info");
    std::string why;
    const auto found = find_snapshot(given(directory, "directory"), &why);
    if (!found) throw Error(Code::kNotFound, {directory, "is no whole snapshot: " + why, 0, "name one"});
    write_struct(facts, {.struct_size = 0,
                         .step = found->step,
                         .model = found->model,
                         .weights = static_cast<spillway_dtype>(found->weights)});
  });
}

spillway_status spillway_remove_snapshot(const char* directory) {
  return guarded([&] { remove_snapshot(given(directory, "directory")); });
}

spillway_status spillway_export_store(const char* const* paths, size_t count, const char* directory,
                                      const spillway_export_options* options, uint64_t* step) {
  return guarded([&] {
    std::vector<std::filesystem::path> all;
    given(paths, "paths");
    for (size_t i = 0; i < count; ++i) all.emplace_back(given(paths[i], "paths"));
    const auto exported = export_store(all, given(directory, "directory"), read_export_options(options));
    if (step != nullptr) *step = exported.step;
  });
}

spillway_status spillway_export_snapshot(const char* snapshot, const char* directory,
                                         const spillway_export_options* options, uint64_t* step) {
  return guarded([&] {
    const auto exported =
        export_snapshot(given(snapshot, "snapshot"), given(directory, "directory"), read_export_options(options));
    if (step != nullptr) *step = exported.step;
  });
}
