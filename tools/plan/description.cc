#include "tools/plan/description.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/gpt2/carver.h"
#include "tools/gpt2/ops.h"
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

// How the visits of a step follow each other, with what each computes and which activations it uses: the order of
// gpt2::Gpt2Trainer::run_step. T5's encoder output is one more activation, with its gradient.
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
    use({{0, Access::kWrite}});
    for (std::uint32_t l = 0; l < all; ++l) {
      if (shape_.encodes() && l == shape_.layers) {
        visit(0, Pass::kForward, {.work = Work::kEmbed});  // the decoder's tokens
        use({{input_of(l), Access::kWrite}});
      }
      visit(l + 1, Pass::kForward, {.work = Work::kForward, .flops = forward_flops(l)});
      if (decodes(l)) {
        use({{input_of(l), Access::kRead}, {encoded(), Access::kRead}, {input_of(l) + 1, Access::kWrite}});
      } else {
        use({{input_of(l), Access::kRead}, {input_of(l) + 1, Access::kWrite}});
      }
    }
    const std::uint32_t gradient = input_of(all - 1) + 1;
    visit(head, Pass::kBackward, {.work = Work::kHead, .flops = 6 * tokens_ * shape_.vocabulary * shape_.width});
    use({{gradient, Access::kUpdate}});
    for (std::uint32_t l = all; l-- > 0;) backward(l, gradient);
    visit(0, Pass::kBackward,
          {.work = Work::kEmbedBackward, .pushed = static_cast<double>(shape_.vocabulary) * shape_.width});
    use({{shape_.encodes() ? encoded_gradient() : gradient, Access::kRead}});
    model_.activations.assign(std::size_t{activations_} * micro_batches_,
                              {.bytes = static_cast<std::uint64_t>(tokens_) * shape_.width * element_bytes_});
    model_.activations_held = shape_.encodes() ? 4 : 2;
  }
  void of_elements(std::uint64_t bytes) { element_bytes_ = bytes; }

 private:
  using Uses = std::vector<std::pair<std::uint32_t, Access>>;

  bool decodes(std::uint32_t layer) const { return shape_.encodes() && layer >= shape_.layers; }
  // Of T5: 0 to layers for the encoder, whose last is its output; then the decoder's.
  std::uint32_t input_of(std::uint32_t layer) const { return layer + (decodes(layer) ? 1 : 0); }
  std::uint32_t encoded() const { return shape_.layers; }

  void backward(std::uint32_t l, std::uint32_t gradient) {
    if (shape_.encodes() && l + 1 == shape_.layers) {
      // The decoder's embedding is done, and the encoder goes on with the gradient of its output.
      visit(0, Pass::kBackward, {.work = Work::kEmbedBackward});
      use({{gradient, Access::kRead}});
    }
    const double flops = forward_flops(l);
    visit(l + 1, Pass::kBackward,
          {.work = Work::kBackward, .flops = 2 * flops, .again_flops = flops - last_product_flops()});
    const std::uint32_t own = shape_.encodes() && !decodes(l) ? encoded_gradient() : gradient;
    if (decodes(l)) {
      const bool first = l + 1 == shape_.layers + shape_.decoder_layers;
      use({{input_of(l), Access::kRead},
           {own, Access::kUpdate},
           {encoded(), Access::kRead},
           {encoded_gradient(), first ? Access::kWrite : Access::kUpdate}});
    } else {
      use({{input_of(l), Access::kRead}, {own, Access::kUpdate}});
    }
  }
  std::uint32_t encoded_gradient() const { return shape_.layers + shape_.decoder_layers + 2; }

  void visit(std::uint32_t block, Pass pass, VisitWork work) {
    for (double* flops : {&work.flops, &work.again_flops}) *flops *= micro_batches_;
    model_.visits.push_back({block, pass});
    described_.work.push_back(work);
  }
  void use(const Uses& uses) {
    const auto visit = static_cast<std::uint32_t>(model_.visits.size() - 1);
    for (std::uint32_t b = 0; b < micro_batches_; ++b) {
      for (const auto& [activation, access] : uses) {
        model_.activation_uses.push_back({activation * micro_batches_ + b, access, visit});
        activations_ = std::max(activations_, activation + 1);
      }
    }
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
  std::uint64_t element_bytes_ = 2;
  std::uint32_t activations_ = 0;
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

// As gpt2::Gpt2Trainer::Workspace, around the scratch memory of the operations.
std::uint64_t workspace_bytes(const ModelShape& shape, const Config& config, std::uint64_t tokens,
                              std::uint64_t scratch, const Block& layer) {
  const std::uint64_t micro_batches = config.gradient_accumulation;
  Carver carver(nullptr);
  const auto rows = [&](std::uint64_t columns) { carver.take<std::byte>(tokens * columns * size_of(config.weights)); };
  carver.take<std::byte>(scratch);
  for (int exchanged = 0; exchanged < 3; ++exchanged) carver.take<std::uint32_t>(micro_batches * tokens);
  rows(shape.width);  // the head's norm
  carver.take<float>(tokens);
  rows(shape.inner * (shape.gated ? 2u : 1u));
  rows(shape.width);
  rows(shape.query_width() + 2 * shape.key_width());
  const std::uint64_t element = micro_batches == 1 ? size_of(config.weights) : sizeof(float);
  std::uint64_t largest = 0;
  for (const Parameter& parameter : layer.parameters) {
    const std::uint64_t bytes = gpt2::elements(parameter) * element;
    if (micro_batches == 1 && parameter.shape.size() == 2) {
      largest = std::max(largest, bytes);  // matrices take turns
    } else {
      carver.take<std::byte>(bytes);
    }
  }
  carver.take<std::byte>(largest);
  carver.take<float>(std::uint64_t{shape.vocabulary} * shape.width);  // of the head, then of the embedding
  carver.take<float>(shape.width);
  return carver.used();
}

// The operations of a GPT-2 of the same sizes.
std::uint64_t scratch_bytes(const ModelShape& shape, const gpt2::TrainerOptions& options) {
  gpt2::Shape like{.type = options.type, .batch = options.micro_batch, .sequence = options.sequence};
  like.width = static_cast<std::uint32_t>(std::max<std::uint64_t>(shape.query_width(), shape.head_width));
  like.heads = shape.heads;
  like.inner = shape.inner;
  like.vocabulary = shape.vocabulary;
  like.positions = options.sequence;
  return gpt2::create_ops(options.device, like, options.threads)->scratch_bytes();
}

constexpr const char* kNoDevice =
    "scratch memory of the operations: as the host device has it, for this machine has no GPU to ask";

DescribedModel describe_gpt2(const ModelShape& shape, const Config& config, const RunShape& run,
                             const gpt2::TrainerOptions& options) {
  DescribedModel described;
  if (run.sequence > shape.positions) {
    throw Error(Code::kInvalidArgument, {.object = "--seq",
                                         .happened = fmt::format("{} tokens are more than the model's {} positions",
                                                                 run.sequence, shape.positions),
                                         .errno_value = 0,
                                         .hint = fmt::format("use --seq {} or less", shape.positions)});
  }
  // The trainer's own order of visits and uses; StepWriter is there for what each computes.
  described.model = gpt2::describe_model(*shape.gpt2, 0);
  described.model.visits.clear();
  StepWriter(shape, config, run.sequence, described).write();
  described.model = gpt2::Gpt2Trainer(*shape.gpt2, options).description();
  return described;
}

// What python/spillway/layout.py says of the model: a step goes through all of it with one micro-batch after the other,
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
  for (const Activation& kept : round.model.activations) beside += kept.bytes;
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
  const DeviceKind asked = run.device_here ? run.device : DeviceKind::kHost;
  const gpt2::TrainerOptions options = gpt2::trainer_options(config, asked, run.sequence);
  const std::uint64_t tokens = std::uint64_t{config.micro_batch} * run.sequence;
  DescribedModel described;
  if (run.loop == Loop::kPyTorch) {
    described = describe_pytorch(shape, config, run);
  } else if (shape.gpt2) {
    described = describe_gpt2(shape, config, run, options);
  } else {
    described.model = stack_of(shape);
    ModelDescription& model = described.model;
    StepWriter writer(shape, config, run.sequence, described);
    writer.of_elements(size_of(config.weights));
    writer.write();
    for (std::uint32_t l = 0; l < shape.layers + shape.decoder_layers; ++l) {
      model.blocks[l + 1].inside_bytes =
          inside_bytes(shape, config.weights, tokens, shape.encodes() && l >= shape.layers);
    }
    model.micro_batches = config.gradient_accumulation;
    if (shape.encodes()) {
      // Visits of several stacks push the embedding's gradient; working memory sums it, as that of a tied one.
      described.estimates.push_back("a row has as many tokens for the decoder as for the encoder");
    }
    model.workspace_bytes = workspace_bytes(shape, config, tokens, scratch_bytes(shape, options),
                                            model.blocks[shape.layers + shape.decoder_layers]);
    described.estimates.push_back(fmt::format(
        "spillway finetune does not train {} yet: parameters and their bytes are exact, insides, activations and "
        "working memory are what a trainer like that of GPT-2 would ask for",
        shape.family));
  }
  if (!run.device_here && run.loop == Loop::kFinetune) described.estimates.emplace_back(kNoDevice);
  described.parameters = count_parameters(described.model);
  described.tokens = tokens * config.gradient_accumulation;
  return described;
}

}  // namespace spillway::planning
