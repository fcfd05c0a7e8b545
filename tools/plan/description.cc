#include "tools/plan/description.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/models/config_json.h"
#include "tools/models/lora.h"
#include "tools/models/ops/carver.h"
#include "tools/models/trainer.h"

namespace spillway::planning {
namespace {

using models::Carver;

// How the visits of a step follow each other, with what each computes: the order of models::Trainer::run_step.
class StepWriter {
 public:
  StepWriter(const ModelShape& shape, const Config& config, std::uint32_t sequence, DescribedModel& described)
      : shape_(shape),
        described_(described),
        model_(described.model),
        micro_batches_(config.gradient_accumulation),
        tokens_(static_cast<double>(config.micro_batch) * sequence),
        sequence_(sequence) {}

  // Adapters alone are trained where there are some: weights have no gradients then.
  void write(const std::optional<models::TrainedAdapters>& adapters = {}) {
    const std::uint32_t all = shape_.layers + shape_.decoder_layers;
    trains_base_ = !adapters;
    lowest_ = adapters ? adapters->lowest : 0;
    adapter_weights_ = adapters ? weights_of(adapters->block) / (all - lowest_) : 0;
    const std::uint32_t head = shape_.tied ? 0 : all + 1;
    visit(0, Pass::kForward, {.work = Work::kEmbed});
    if (adapters) visit(adapters->block, Pass::kForward, {.work = Work::kEmbed});
    for (std::uint32_t l = 0; l < all; ++l) {
      if (shape_.encodes() && l == shape_.layers) visit(0, Pass::kForward, {.work = Work::kEmbed});  // its tokens
      visit(l + 1, Pass::kForward, {.work = Work::kForward, .flops = forward_flops(l)});
    }
    visit(head, Pass::kBackward,
          {.work = Work::kHead, .flops = (trains_base_ ? 6 : 4) * tokens_ * shape_.vocabulary * shape_.width});
    if (adapters) visit(adapters->block, Pass::kBackward, {.work = Work::kEmbed});
    for (std::uint32_t l = all; l-- > lowest_;) {
      // The decoder's embedding is done, and the encoder goes on with the gradient of its output.
      if (shape_.encodes() && l + 1 == shape_.layers) visit(0, Pass::kBackward, {.work = Work::kEmbedBackward});
      const double flops = forward_flops(l);
      visit(l + 1, Pass::kBackward,
            {.work = Work::kBackward, .flops = backward_flops(l), .again_flops = flops - last_product_flops()});
    }
    if (adapters) return;
    visit(0, Pass::kBackward,
          {.work = Work::kEmbedBackward, .pushed = static_cast<double>(shape_.vocabulary) * shape_.width});
  }

 private:
  bool decodes(std::uint32_t layer) const { return shape_.encodes() && layer >= shape_.layers; }

  void visit(std::uint32_t block, Pass pass, VisitWork work) {
    for (double* flops : {&work.flops, &work.again_flops}) *flops *= micro_batches_;
    model_.visits.push_back({block, pass});
    described_.work.push_back(work);
  }

  double weights_of(std::uint32_t block) const {
    double weights = 0;
    for (const Parameter& parameter : model_.blocks[block].parameters) {
      if (parameter.shape.size() == 2) weights += static_cast<double>(models::elements(parameter));
    }
    return weights;
  }
  // Two operations for each weight of a matrix and token, and the products of attention: with the keys, with the
  // values; a causal row sees half of them.
  double forward_flops(std::uint32_t layer) const {
    const double adapters = layer < lowest_ ? 0 : adapter_weights_;
    return 2 * tokens_ * (weights_of(layer + 1) + adapters) + attention_flops(layer);
  }
  // A weight's own gradient takes as much as that of what it is multiplied with.
  double backward_flops(std::uint32_t layer) const {
    const double weights = weights_of(layer + 1);
    return 2 * tokens_ * ((trains_base_ ? 2 : 1) * weights + 3 * adapter_weights_) + 2 * attention_flops(layer);
  }
  double attention_flops(std::uint32_t layer) const {
    const bool causal = !shape_.encodes() || decodes(layer);
    double seen = causal ? sequence_ / 2 : sequence_;
    if (shape_.window > 0) seen = std::min<double>(seen, shape_.window);
    if (decodes(layer)) seen += sequence_;
    return 4 * tokens_ * seen * static_cast<double>(shape_.query_width());
  }
  double last_product_flops() const { return 2 * tokens_ * shape_.inner * shape_.width; }

  const ModelShape& shape_;
  DescribedModel& described_;
  ModelDescription& model_;
  const std::uint32_t micro_batches_;
  const double tokens_, sequence_;
  bool trains_base_ = true;
  std::uint32_t lowest_ = 0;    // layer that goes backward
  double adapter_weights_ = 0;  // of a layer from there on, on average
};

// As models::LayerForward::Inside: what a layer computes from its input and its backward needs.
std::uint64_t inside_bytes(const ModelShape& shape, DType type, std::uint64_t tokens, bool decodes) {
  Carver carver(nullptr);
  const auto rows = [&](std::uint64_t columns) { carver.take<std::byte>(tokens * columns * size_of(type)); };
  const auto norm = [&] {
    rows(shape.width);
    carver.take<float>(tokens);
  };
  const auto attention = [&] {
    norm();
    rows(shape.query_width() + 2 * shape.key_width());
    rows(shape.query_width());
    carver.take<float>(tokens * shape.heads);
    rows(shape.width);  // with what came in
  };
  attention();
  if (decodes) attention();
  norm();
  for (int product = 0; product < (shape.gated ? 2 : 1); ++product) rows(shape.inner);
  rows(shape.inner);
  return carver.used();
}

constexpr const char* kNoDevice =
    "scratch memory of the operations: as the host device has it, for this machine has no GPU to ask";

DescribedModel describe_trained(const ModelShape& shape, const Config& config, const RunShape& run) {
  DescribedModel described;
  const DeviceKind asked = run.device_here ? run.device : DeviceKind::kHost;
  models::TrainerOptions options = models::trainer_options(config, asked, run.sequence);
  options.rank_count = run.ranks.all;
  // The trainer's own order of visits; StepWriter is there for what each computes.
  models::TrainedModel trained = models::trained_model(models::ConfigJson(shape.text, shape.name), run.sequence);
  models::check_row(trained, run.sequence);
  if (config.lora.given()) models::add_adapters(trained, config.lora);
  described.model = trained.description;
  described.model.visits.clear();
  StepWriter(shape, config, run.sequence, described).write(trained.adapters);
  described.model = models::Trainer(std::move(trained), options).description();
  if (!run.device_here) described.estimates.emplace_back(kNoDevice);
  return described;
}

// What the Python package says of the model: a step goes through all of it with one micro-batch after the other,
// every visit computes what it needs anew, and what lies between visits is PyTorch's own.
DescribedModel describe_pytorch(const ModelShape& shape, const Config& config, const RunShape& run) {
  if (config.lora.given()) {
    throw Error(Code::kUnsupported, {.object = "spillway.lora",
                                     .happened = "is of spillway finetune alone",
                                     .errno_value = 0,
                                     .hint = "plan for --loop finetune, or leave it out"});
  }
  Config one = config;
  one.gradient_accumulation = 1;
  DescribedModel round;
  round.model = models::describe_parameters(shape);
  round.model.visits.clear();
  StepWriter(shape, one, run.sequence, round).write();

  DescribedModel described;
  described.model.blocks = round.model.blocks;
  std::vector<std::uint32_t> pushes(round.model.blocks.size());
  for (std::uint32_t m = 0; m < config.gradient_accumulation; ++m) {
    for (std::size_t v = 0; v < round.model.visits.size(); ++v) {
      const auto add = [&](Pass pass, const VisitWork& work) {
        described.model.visits.push_back({round.model.visits[v].block, pass});
        described.work.push_back(work);
      };
      const VisitWork& work = round.work[v];
      if (work.work == Work::kHead) add(Pass::kForward, {.work = Work::kHead, .flops = work.flops / 3});
      add(round.model.visits[v].pass, work);
      pushes[round.model.visits[v].block] += round.model.visits[v].pass == Pass::kBackward;
    }
  }
  std::uint64_t largest = 0;
  for (std::size_t b = 0; b < pushes.size(); ++b) {
    for (Parameter& parameter : described.model.blocks[b].parameters) {
      parameter.pushes = std::max(pushes[b], 1u);
      largest = std::max(largest, models::elements(parameter));
    }
  }
  const std::uint64_t element = size_of(config.weights), tokens = std::uint64_t{config.micro_batch} * run.sequence;
  described.model.workspace_bytes = largest * element;
  std::uint64_t beside = tokens * shape.vocabulary * (element + 2 * sizeof(float));  // logits, twice in fp32
  // Inputs of the layers and of the head; of T5 also the encoder's output, and its gradient.
  const std::uint64_t kept = shape.layers + shape.decoder_layers + (shape.encodes() ? 3u : 1u);
  beside += kept * tokens * shape.width * element;
  beside += inside_bytes(shape, config.weights, tokens, shape.encodes());
  described.estimates.push_back(fmt::format(
      "blocks of a PyTorch loop: the embedding, the layers, the head; beside hbm_bytes PyTorch itself keeps "
      "their inputs, one block's inner activations and the logits, about {} MiB",
      div_up(beside, kMiB)));
  if (shape.encodes()) described.estimates.emplace_back("a row has as many tokens for the decoder as for the encoder");
  return described;
}

}  // namespace

std::uint64_t count_parameters(const ModelDescription& model) {
  std::uint64_t count = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) count += models::elements(parameter);
  }
  return count;
}

DescribedModel describe(const ModelShape& shape, const Config& config, const RunShape& run) {
  DescribedModel described;
  if (run.loop == Loop::kPyTorch) {
    described = describe_pytorch(shape, config, run);
  } else if (shape.trained()) {
    described = describe_trained(shape, config, run);
  } else {
    throw Error(Code::kUnsupported, {.object = "--loop finetune",
                                     .happened = fmt::format("spillway finetune does not train {}", shape.family),
                                     .errno_value = 0,
                                     .hint = "plan for --loop pytorch"});
  }
  described.parameters = count_parameters(described.model);
  described.tokens = std::uint64_t{config.micro_batch} * run.sequence * config.gradient_accumulation;
  return described;
}

}  // namespace spillway::planning
