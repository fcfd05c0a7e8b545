// Section "zero_optimization".
#include <cstddef>

#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

Placement placement_of(std::uint64_t choice) {
  return choice == 0 ? Placement::kHbm : choice == 1 ? Placement::kHost : Placement::kNvme;
}

template <Placement Config::*member>
constexpr KeyPlace kDevice = {
    [](D& d, const V& v) { d.config.*member = placement_of(v.integer); },
    [](const C& c) { return json_string(choices_of(kDevices)[static_cast<std::size_t>(c.*member)]); }};

// Values that depend on the model's width: the plan's own choice where that is not known.
template <auto of_width>
std::string from_width(const A& a) {
  return a.hidden_size ? std::to_string(of_width(*a.hidden_size)) : "";
}

// A limit on what the plan does by itself, in parameters, under both of its names. DeepSpeed's default of one of them
// is sys.maxsize.
constexpr ConfigKey limit(std::string_view path, std::string_view doc, KeyPlace place, AutoRule automatic = {}) {
  return K{path, kInteger, "", doc, place, 0, 1.8e19}.filled(automatic).of_each_rank();
}
constexpr ConfigKey also(std::string_view path, const ConfigKey& key) {
  ConfigKey other = key.now(key.path);
  other.path = path;
  return other;
}
constexpr ConfigKey kMaxLive =
    limit("zero_optimization.stage3_max_live_parameters",
          "parameters in HBM places at a time; two places are always kept", at<&C::knobs, &Knobs::max_live_parameters>);
constexpr ConfigKey kMaxReuse = limit("zero_optimization.stage3_max_reuse_distance",
                                      "a block stays in HBM between visits when fewer parameters are visited meanwhile",
                                      at<&C::knobs, &Knobs::max_reuse_distance>);
constexpr ConfigKey kPrefetch = limit("zero_optimization.stage3_prefetch_bucket_size",
                                      "another block is fetched ahead while fewer parameters than these are; 0: none",
                                      at<&C::knobs, &Knobs::prefetch_bucket_size>,
                                      {from_width<[](std::uint64_t h) { return h * h * 9 / 10; }>, "0.9 × width²"});
constexpr ConfigKey kPersistence = limit("zero_optimization.stage3_param_persistence_threshold",
                                         "blocks whose parameters are all this small have HBM places of their own",
                                         at<&C::knobs, &Knobs::param_persistence_threshold>,
                                         {from_width<[](std::uint64_t h) { return h * 10; }>, "10 × width"});
constexpr ConfigKey kModelPersistence =
    limit("zero_optimization.stage3_model_persistence_threshold", "parameters of all blocks with places of their own",
          at<&C::knobs, &Knobs::model_persistence_threshold>);

constexpr ConfigKey kZeroKeys[] = {
    K{"zero_optimization", kSection, "", "what is partitioned, and where it lives; true is stage 1, false stage 0"}
        .or_flag("zero_optimization.stage"),
    K{"zero_optimization.stage", kInteger, "",
      "3: everything may leave the device; 1, 2: all but the weights, as these say the same with one rank; 0: "
      "nothing",
      drafted<&D::stage>(), 0, 3}
        .filled({always<"2">, "accelerate's zero_stage, 2"}),
    K{"zero_optimization.offload_optimizer", kSection, "", "where Adam's states live"}.or_null(),
    K{"zero_optimization.offload_optimizer.device", kChoice, "\"none\"", "none: HBM, cpu: pinned host memory, nvme",
      kDevice<&C::states>}
        .allows(kDevices),
    K{"zero_optimization.offload_optimizer.nvme_path", kText, "",
      "with device nvme: directory of the store; the same in both sections, or in one",
      drafted<&D::states_path>(first_path)}
        .or_null()
        .of_each_rank(),
    K{"zero_optimization.offload_param", kSection, "", "where the weights live"}.or_null(),
    K{"zero_optimization.offload_param.device", kChoice, "\"none\"", "none: HBM, cpu: pinned host memory, nvme",
      kDevice<&C::parameters>}
        .allows(kDevices),
    K{"zero_optimization.offload_param.nvme_path", kText, "",
      "with device nvme: directory of the store; the same in both sections, or in one",
      drafted<&D::parameters_path>(first_path)}
        .or_null()
        .of_each_rank(),
    K{"zero_optimization.cpu_offload", kBool, "false", "older word for offload_optimizer {\"device\": \"cpu\"}",
      drafted<&D::cpu_offload>()}
        .now("zero_optimization.offload_optimizer.device"),
    K{"zero_optimization.cpu_offload_param", kBool, "false", "older word for offload_param {\"device\": \"cpu\"}",
      drafted<&D::cpu_offload_param>()}
        .now("zero_optimization.offload_param.device"),
    kMaxLive,
    also("zero_optimization.max_live_parameters", kMaxLive),
    kMaxReuse,
    also("zero_optimization.max_reuse_distance", kMaxReuse),
    kPrefetch,
    also("zero_optimization.prefetch_bucket_size", kPrefetch),
    kPersistence,
    also("zero_optimization.param_persistence_threshold", kPersistence),
    kModelPersistence,
    also("zero_optimization.model_persistence_threshold", kModelPersistence),
    {"zero_optimization.sub_group_size", kInteger, "",
     "spillway.tile_elements when that is missing, rounded and up to 16 Mi; 0: ignored", drafted<&D::sub_group_size>()},
    K{"zero_optimization.offload_optimizer.buffer_count", kInteger, "", "tile buffers in host memory",
      at<&C::knobs, &Knobs::optimizer_buffer_count>, 1, kMost32}
        .of_each_rank(),
    K{"zero_optimization.offload_optimizer.pipeline_read", kBool, "", "false: no tile is read while another is updated",
      at<&C::knobs, &Knobs::pipeline_read>}
        .of_each_rank(),
    K{"zero_optimization.offload_optimizer.pipeline_write", kBool, "",
      "false: a tile's writes are waited for before the next", at<&C::knobs, &Knobs::pipeline_write>}
        .of_each_rank(),
    K{"zero_optimization.offload_param.buffer_count", kInteger, "",
      "weights in flight take at most buffer_count × buffer_size in host memory",
      at<&C::knobs, &Knobs::param_buffer_count>, 1, kMost32}
        .of_each_rank(),
    K{"zero_optimization.offload_param.buffer_size", kInteger, "", "see buffer_count",
      at<&C::knobs, &Knobs::param_buffer_size>, 1, kMost32}
        .of_each_rank(),
    K{"zero_optimization.offload_param.max_in_cpu", kInteger, "",
      "at most so many weights are kept in host memory as a cache", at<&C::knobs, &Knobs::max_in_cpu>}
        .of_each_rank(),
};

}  // namespace

std::span<const ConfigKey> zero_optimization_keys() { return kZeroKeys; }

}  // namespace spillway
