#include "tools/finetune/run_weights.h"

#include <fmt/format.h>

#include <span>

#include "spillway/error.h"
#include "spillway/export.h"
#include "tools/models/lora.h"

namespace spillway::models::finetune {
namespace {

void give_weights(Engine& engine, const TrainedModel& model, const ModelDescription& output, const WeightSink& sink) {
  if (!model.adapters) return engine.export_weights(true, sink);
  const std::uint32_t adapters = model.adapters->block;
  const WeightSink of_adapters = [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                     std::span<const float> values) {
    if (block == adapters) sink(0, parameter, first, values);
  };
  for (std::uint32_t p = 0; p < output.blocks[0].parameters.size(); ++p)
    engine.read_values(ParameterValues::kMaster, adapters, p, of_adapters);
}

}  // namespace

FirstWeights::FirstWeights(const TrainedModel& model, const std::filesystem::path& directory,
                           const std::filesystem::path& adapter, const Config& config)
    : base_(directory, base_of(model)) {
  base_.check(config.weights);
  if (!model.adapters) return;
  adapter_block_ = model.adapters->block;
  if (adapter.empty())
    adapters_.emplace(model, config.lora.seed);
  else
    adapters_.emplace(model, config.lora, adapter);
}

WeightSource FirstWeights::source() {
  if (!adapters_) return base_.source();
  return [this, of_base = base_.source()](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                          std::span<float> out) {
    if (block == adapter_block_)
      adapters_->read(parameter, first, out);
    else
      of_base(block, parameter, first, out);
  };
}

ModelDescription output_of(const TrainedModel& model) {
  return model.adapters ? adapters_of(model) : model.description;
}

// Where the first rank cannot write, the others' call must not wait for it.
void write_output(Engine& engine, Ranks& ranks, const TrainedModel& model, const ModelDescription& output,
                  const std::filesystem::path& out, const std::filesystem::path& base) {
  const auto nowhere = [](auto, auto, auto, auto) {};
  bool given = false;
  const auto give = [&](const WeightSink& sink) {
    given = true;
    give_weights(engine, model, output, sink);
  };
  ranks.together([&] {
    if (!ranks.first()) return give(nowhere);
    try {
      export_model(output, out, {.type = DType::kFloat32, .replace = true, .base = base.string()}, give);
    } catch (const Error&) {
      if (!given && !ranks.alone()) give(nowhere);
      throw;
    }
  });
}

std::string told_of_output(const TrainedModel& model, const std::filesystem::path& out) {
  const char* loads = model.adapters           ? "AutoPeftModelForCausalLM"
                      : model.family == "gpt2" ? "GPT2LMHeadModel"
                                               : "AutoModelForCausalLM";
  return fmt::format("trained {}: {}\n  {}.from_pretrained(\"{}\") loads it\n", model.adapters ? "adapter" : "model",
                     out.string(), loads, out.string());
}

}  // namespace spillway::models::finetune
