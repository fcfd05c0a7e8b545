// Section "spillway": what DeepSpeed has no word for.
#include <algorithm>
#include <array>
#include <string_view>

#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr double kMostRank = 65536;

constexpr auto kDeviceChoices = [] {
  std::array<std::string_view, kDeviceNames.size() + 1> names = {};
  *std::ranges::copy(kDeviceNames, names.begin()).out = "auto";
  return names;
}();

template <auto member>
constexpr KeyPlace kOfGroup = {[](D& d, const V& v) { assign(d.config.parameter_groups.back().*member, v); }};

constexpr ConfigKey kSpillwayKeys[] = {
    {"spillway", kSection, "", "what DeepSpeed has no word for"},
    K{"spillway.device",
      kChoice,
      "\"auto\"",
      "host: HBM is emulated in RAM; cuda: the GPU; auto: cuda where there is one, else host",
      {[](D& d, const V& v) {
         d.config.device.reset();
         if (v.integer < kDeviceNames.size()) d.config.device = static_cast<DeviceKind>(v.integer);
       },
       [](const C& c) { return json_string(c.device ? name_of(*c.device) : "auto"); }}}
        .allows(any_of<kDeviceChoices>)
        .of_each_rank(),
    K{"spillway.hbm_bytes", kBytes, "", "budget of GPU memory; what the plan asks for when missing", at<&C::hbm_bytes>}
        .of_each_rank(),
    K{"spillway.host_bytes", kBytes, "", "budget of pinned host memory; what the plan asks for when missing",
      at<&C::host_bytes>}
        .of_each_rank(),
    K{"spillway.nvme_bytes", kBytes, "", "budget on the drive; what the store needs when missing", at<&C::nvme_bytes>}
        .of_each_rank(),
    K{"spillway.nvme_paths", kTexts, "",
      "directories, one per drive, that a store is striped over; nvme_path first; of any device",
      drafted<&D::nvme_paths>(all_paths)}
        .of_each_rank(),
    K{"spillway.nvme_rates", kNumbers, "",
      "GB/s of each path, reads and writes mixed, as the sweep measures them; probed when missing",
      drafted<&D::nvme_rates>([](const C& c) { return c.nvme_rates.empty() ? "" : json_of(c.nvme_rates); }), 0.001, 1e6}
        .of_each_rank(),
    K{"spillway.tile_elements", kInteger, "4194304", "parameters per tile", at<&C::tile_elements>, 1024, 1 << 30}
        .multiples_of(1024),
    {"spillway.commit_every", kInteger, "", "steps between commits; 0: half the disk, no resume or export",
     at<&C::commit_every>, 0, kMost32},
    K{"spillway.speculative_blocks", kInteger, "",
      "blocks updated inside backward on the guess that clipping has no effect; 0: none", at<&C::speculative_blocks>, 0,
      kMost32}
        .of_each_rank(),
    {"spillway.sum_groups", kInteger, "1",
     "a power of two that divides gradient_accumulation_steps × ranks, and is a multiple of the ranks: micro-batches "
     "are summed in so many parts, these by a tree",
     at<&C::sum_groups>, 1, kMostSumGroups},
    {"spillway.no_decay", kBool, "false", "no weight decay for parameters of fewer than two dimensions: biases, norms",
     at<&C::no_decay>},
    K{"spillway.states", kChoice, "\"fp32\"",
      "how the moments of Adam and Lion are stored, beside exact master weights: fp32 is exact", at<&C::moments>}
        .allows(any_of<kMomentFormats>),
    {"spillway.exact_states", kTexts, "[\"*embed*\", \"*wte*\", \"*wpe*\"]",
     "names of parameters whose moments stay fp32, as those of fewer than two dimensions do; * stands for anything",
     at<&C::exact_states>},
    {"spillway.rounding_seed",
     kInteger,
     "0",
     "seed of the random bits that round moments in fewer bytes; they depend on the update's number, too",
     {[](D& d, const V& v) { d.config.optimizer.seed = v.integer; },
      [](const C& c) { return json_of(c.optimizer.seed); }},
     0,
     kMost32},
    {"spillway.parameter_groups",
     kSections,
     "",
     "parameters with values of their own; the first that matches decides",
     {[](D& d, const V& v) {
        auto& groups = d.config.parameter_groups;
        v.flag ? groups.clear() : static_cast<void>(groups.emplace_back());
      },
      all_groups}},
    {"spillway.parameter_groups.parameters", kTexts, "", "their names; * stands for anything",
     kOfGroup<&ParameterGroup::parameters>},
    {"spillway.parameter_groups.lr", kNumber, "", "learning rate, scaled by a schedule as the optimizer's is",
     kOfGroup<&ParameterGroup::learning_rate>},
    {"spillway.parameter_groups.weight_decay", kNumber, "", "weight decay; the optimizer's when missing",
     kOfGroup<&ParameterGroup::weight_decay>},
    {"spillway.lora", kSection, "",
     "spillway finetune: low-rank adapters, which alone are trained; the base is frozen"},
    {"spillway.lora.rank", kInteger, "8", "columns between the two products of an adapter", at<&C::lora, &L::rank>, 1,
     kMostRank},
    {"spillway.lora.alpha", kNumber, "8", "what an adapter gives is multiplied with alpha / rank",
     at<&C::lora, &L::alpha>, 1e-6, 1e6},
    {"spillway.lora.targets",
     kTexts,
     "",
     "modules by their names, or by the ends of these after a dot (q_proj, attn.c_proj); \"all-linear\": all of the "
     "layers'",
     {at<&C::lora, &L::targets>.set, [](const C& c) { return c.lora.given() ? json_of(c.lora.targets) : ""; }}},
    {"spillway.lora.seed", kInteger, "0", "of the first values of A; B begins as zeros", at<&C::lora, &L::seed>, 0,
     kMost32},
    {"spillway.lora.dropout", kNumber, "0", "0 only: dropout of adapters is not computed", kAsWritten, 0, 0},
    {"spillway.block_slices", kInteger, "1", "Python's engine: parts of a batch that go through a block one by one",
     kAsWritten, 1, 4096},
    {"spillway.logit_slices", kInteger, "1",
     "Python's engine: parts of a batch's tokens for which a model's head and the loss run one by one", kAsWritten, 1,
     65536},
    {"spillway.micro_batches_together", kBool, "false",
     "Python's engine and Trainer: the micro-batches of a step go through block after block together", kAsWritten},
    K{"spillway.block_inputs", kChoice, "\"none\"",
      "Python's engine: where block inputs wait for backward; cpu with cpu_checkpointing", kAsWritten}
        .allows(kDevices),
    K{"spillway.slice_tokens", kInteger, "16384",
      "finetune: tokens of a micro-batch that go through a block together, at most, 128 or more; 0: all",
      at<&C::slice_tokens>, 0, kMost32}
        .of_each_rank(),
    K{"spillway.threads", kInteger, "0", "compute threads; 0: one per core that this process may use", at<&C::threads>,
      0, 4096}
        .of_each_rank(),
    K{"spillway.io_engine", kChoice, "\"auto\"", "how requests reach the kernel", at<&C::io_engine>}
        .allows(any_of<kIoEngineNames>)
        .of_each_rank(),
};

}  // namespace

std::span<const ConfigKey> spillway_keys() { return kSpillwayKeys; }

}  // namespace spillway
