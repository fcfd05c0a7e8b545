#include "tools/plan/description.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/gpt2/carver.h"
#include "tools/gpt2/trainer.h"

namespace spillway::planning {
namespace {

using gpt2::Carver;

Parameter tensor(std::string name, std::vector<std::uint64_t> shape) {
  return {.name = std::move(name), .shape = std::move(shape)};
}

void add_linear(Block& block, const std::string& name, std::uint64_t in, std::uint64_t out, bool bias) {
  block.parameters.push_back(tensor(name + ".weight", {out, in}));
  if (bias) block.parameters.push_back(tensor(name + ".bias", {out}));
}

Block decoder_layer(const ModelShape& shape, std::uint32_t layer) {
  const std::uint64_t width = shape.width, inner = shape.inner;
  const std::string name = fmt::format("model.layers.{}.", layer);
  Block block{.name = fmt::format("layer {}", layer), .parameters = {}};
  block.parameters.push_back(tensor(name + "input_layernorm.weight", {width}));
  add_linear(block, name + "self_attn.q_proj", width, shape.query_width(), shape.query_bias);
  add_linear(block, name + "self_attn.k_proj", width, shape.key_width(), shape.query_bias);
  add_linear(block, name + "self_attn.v_proj", width, shape.key_width(), shape.query_bias);
  add_linear(block, name + "self_attn.o_proj", shape.query_width(), width, shape.output_bias);
  if (shape.query_norm) {
    for (const char* norm : {"q_norm", "k_norm"})
      block.parameters.push_back(tensor(fmt::format("{}self_attn.{}.weight", name, norm), {shape.head_width}));
  }
  block.parameters.push_back(tensor(name + "post_attention_layernorm.weight", {width}));
  add_linear(block, name + "mlp.gate_proj", width, inner, shape.mlp_bias);
  add_linear(block, name + "mlp.up_proj", width, inner, shape.mlp_bias);
  add_linear(block, name + "mlp.down_proj", inner, width, shape.mlp_bias);
  return block;
}

// A layer of T5's encoder, or with attention to the encoder's output of its decoder.
Block t5_layer(const ModelShape& shape, const char* stack, std::uint32_t layer) {
  const bool decodes = stack == std::string_view("decoder");
  const std::uint64_t width = shape.width, inner = shape.inner, query = shape.query_width();
  const std::string name = fmt::format("{}.block.{}.layer.", stack, layer);
  Block block{.name = fmt::format("{} layer {}", stack, layer), .parameters = {}};
  int part = 0;
  const auto add_norm = [&] {
    block.parameters.push_back(tensor(fmt::format("{}{}.layer_norm.weight", name, part++), {width}));
  };
  for (const char* attention : {"SelfAttention", "EncDecAttention"}) {
    if (part > 0 && !decodes) break;
    const std::string at = fmt::format("{}{}.{}.", name, part, attention);
    for (const char* product : {"q", "k", "v"}) add_linear(block, at + product, width, query, false);
    add_linear(block, at + "o", query, width, false);
    // The first layer's positions are those of every layer of the stack.
    if (layer == 0 && part == 0)
      block.parameters.push_back(tensor(at + "relative_attention_bias.weight", {shape.buckets, shape.heads}));
    add_norm();
  }
  const std::string mlp = fmt::format("{}{}.DenseReluDense.", name, part);
  if (shape.gated) {
    add_linear(block, mlp + "wi_0", width, inner, false);
    add_linear(block, mlp + "wi_1", width, inner, false);
  } else {
    add_linear(block, mlp + "wi", width, inner, false);
  }
  add_linear(block, mlp + "wo", inner, width, false);
  add_norm();
  return block;
}

// Blocks: the embedding, the layers (of T5 those of the encoder, then those of the decoder), and, unless it is tied to
// the embedding, the head with the final norm.
ModelDescription stack_of(const ModelShape& shape) {
  const std::uint64_t width = shape.width, vocabulary = shape.vocabulary;
  ModelDescription model;
  const bool t5 = shape.encodes();
  model.blocks.push_back(
      {.name = "embedding",
       .parameters = {tensor(t5 ? "shared.weight" : "model.embed_tokens.weight", {vocabulary, width})}});
  for (std::uint32_t l = 0; l < shape.layers; ++l)
    model.blocks.push_back(t5 ? t5_layer(shape, "encoder", l) : decoder_layer(shape, l));
  for (std::uint32_t l = 0; l < shape.decoder_layers; ++l) model.blocks.push_back(t5_layer(shape, "decoder", l));
  if (t5) model.blocks[shape.layers].parameters.push_back(tensor("encoder.final_layer_norm.weight", {width}));
  Block head{.name = "head", .parameters = {}};
  Block& last = shape.tied ? model.blocks[0] : head;
  last.parameters.push_back(tensor(t5 ? "decoder.final_layer_norm.weight" : "model.norm.weight", {width}));
  if (shape.tied) return model;
  head.parameters.push_back(tensor("lm_head.weight", {vocabulary, width}));
  model.blocks.push_back(std::move(head));
  return model;
}

// How the visits of a step follow each other, with what each computes: the order of gpt2::Gpt2Trainer::run_step.
class StepWriter {
 public:
  StepWriter(const ModelShape& shape, const Config& config, std::uint32_t sequence, DescribedModel& described)
      : shape_(shape),
        described_(described),
        model_(described.model),
        micro_batches_(config.gradient_accumulation),
        tokens_(static_cast<double>(config.micro_batch) * sequence),
        sequence_(sequence) {}

  void write() {
    const std::uint32_t all = shape_.layers + shape_.decoder_layers;
    const std::uint32_t head = shape_.tied ? 0 : all + 1;
    visit(0, Pass::kForward, {.work = Work::kEmbed});
    for (std::uint32_t l = 0; l < all; ++l) {
      if (shape_.encodes() && l == shape_.layers) visit(0, Pass::kForward, {.work = Work::kEmbed});  // its tokens
      visit(l + 1, Pass::kForward, {.work = Work::kForward, .flops = forward_flops(l)});
    }
    visit(head, Pass::kBackward, {.work = Work::kHead, .flops = 6 * tokens_ * shape_.vocabulary * shape_.width});
    for (std::uint32_t l = all; l-- > 0;) {
      // The decoder's embedding is done, and the encoder goes on with the gradient of its output.
      if (shape_.encodes() && l + 1 == shape_.layers) visit(0, Pass::kBackward, {.work = Work::kEmbedBackward});
      const double flops = forward_flops(l);
      visit(l + 1, Pass::kBackward,
            {.work = Work::kBackward, .flops = 2 * flops, .again_flops = flops - last_product_flops()});
    }
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

  // Two operations for each weight of a matrix and token, and the products of attention: with the keys, with the
  // values; a causal row sees half of them.
  double forward_flops(std::uint32_t layer) const {
    double weights = 0;
    for (const Parameter& parameter : model_.blocks[layer + 1].parameters) {
      if (parameter.shape.size() == 2) weights += static_cast<double>(gpt2::elements(parameter));
    }
    const bool causal = !shape_.encodes() || decodes(layer);
    double seen = causal ? sequence_ / 2 : sequence_;
    if (shape_.window > 0) seen = std::min<double>(seen, shape_.window);
    if (decodes(layer)) seen += sequence_;
    return 2 * tokens_ * weights + 4 * tokens_ * seen * static_cast<double>(shape_.query_width());
  }
  double last_product_flops() const { return 2 * tokens_ * shape_.inner * shape_.width; }

  const ModelShape& shape_;
  DescribedModel& described_;
  ModelDescription& model_;
  const std::uint32_t micro_batches_;
  const double tokens_, sequence_;
};

// As gpt2::Gpt2Trainer::Inside: what a layer computes from its input and its backward needs.
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

DescribedModel describe_gpt2(const ModelShape& shape, const Config& config, const RunShape& run) {
  DescribedModel described;
  if (run.sequence > shape.positions) {
    throw Error(Code::kInvalidArgument, {.object = "--seq",
                                         .happened = fmt::format("{} tokens are more than the model's {} positions",
                                                                 run.sequence, shape.positions),
                                         .errno_value = 0,
                                         .hint = fmt::format("use --seq {} or less", shape.positions)});
  }
  const DeviceKind asked = run.device_here ? run.device : DeviceKind::kHost;
  gpt2::TrainerOptions options = gpt2::trainer_options(config, asked, run.sequence);
  options.rank_count = run.ranks.all;
  // The trainer's own order of visits; StepWriter is there for what each computes.
  described.model = gpt2::describe_model(*shape.gpt2, 0);
  described.model.visits.clear();
  StepWriter(shape, config, run.sequence, described).write();
  described.model = gpt2::Gpt2Trainer(*shape.gpt2, options).description();
  if (!run.device_here) described.estimates.emplace_back(kNoDevice);
  return described;
}

// What the Python package says of the model: a step goes through all of it with one micro-batch after the other,
// every visit computes what it needs anew, and what lies between visits is PyTorch's own.
DescribedModel describe_pytorch(const ModelShape& shape, const Config& config, const RunShape& run) {
  Config one = config;
  one.gradient_accumulation = 1;
  DescribedModel round;
  round.model = describe_parameters(shape);
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
      largest = std::max(largest, gpt2::elements(parameter));
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
      "their inputs, one block's insides and the logits, about {} MiB",
      div_up(beside, kMiB)));
  if (shape.encodes()) described.estimates.emplace_back("a row has as many tokens for the decoder as for the encoder");
  return described;
}

}  // namespace

ModelDescription describe_parameters(const ModelShape& shape) {
  return shape.gpt2 ? gpt2::describe_model(*shape.gpt2, 0) : stack_of(shape);
}

std::uint64_t count_parameters(const ModelDescription& model) {
  std::uint64_t count = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) count += gpt2::elements(parameter);
  }
  return count;
}

DescribedModel describe(const ModelShape& shape, const Config& config, const RunShape& run) {
  DescribedModel described;
  if (run.loop == Loop::kPyTorch) {
    described = describe_pytorch(shape, config, run);
  } else if (shape.gpt2) {
    described = describe_gpt2(shape, config, run);
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
