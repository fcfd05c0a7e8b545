// A generator beside the trainer, which computes the same model, and beside itself in other pieces and tiers.
#include "tools/generate/generator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/temp_directory.h"
#include "tests/tools/models/resident_model.h"
#include "tools/models/config_json.h"

namespace spillway::models::generate {
namespace {

constexpr std::uint32_t kTokens = 70;  // more than a window, and than a block of queries

struct Case {
  std::string name;
  TrainedModel model;
};

std::vector<Case> models() {
  std::vector<Case> cases = {{"gpt2", trained_gpt2(tiny_model())}};
  for (const auto& entry : std::filesystem::directory_iterator(SPILLWAY_REFERENCES "/families")) {
    if (entry.path().extension() != ".json") continue;
    cases.push_back({entry.path().stem().string(), trained_model(ConfigJson::read(entry.path(), "", ""), kTokens)});
  }
  return cases;
}

std::vector<std::uint32_t> some_tokens(const TrainedModel& model) { return random_rows(model, 1, kTokens); }

struct Running {
  Running(const TrainedModel& model, const Resident& weights, GeneratorOptions options)
      : options_(options), generator(model, with_positions(options), row_of(model, weights)) {
    engine = std::make_unique<FakeEngine>(generator.description(), options.type, options.threads);
    const std::uint32_t first = generator.first_block();
    for (std::uint32_t b = 0; b < generator.description().blocks.size(); ++b)
      for (std::uint32_t p = 0; p < generator.description().blocks[b].parameters.size(); ++p)
        engine->set_weight(b, p, weights.weights[b + first][p]);
    generator.attach(*engine);
  }
  static GeneratorOptions with_positions(GeneratorOptions options) {
    options.positions = kTokens;
    return options;
  }
  static EmbeddingRow row_of(const TrainedModel& model, const Resident& weights) {
    return [&](std::uint32_t token, std::span<float> row) {
      const std::vector<float>& table = weights.weights[kEmbeddingBlock][model.token_weight];
      std::copy_n(table.begin() + static_cast<std::ptrdiff_t>(token * row.size()), row.size(), row.begin());
    };
  }
  // Logits after `tokens`, which are fed as a prompt and then one by one.
  std::vector<std::vector<float>> feed(std::span<const std::uint32_t> tokens) {
    std::vector<std::vector<float>> all;
    const auto keep = [&](std::span<const float> logits) { all.emplace_back(logits.begin(), logits.end()); };
    keep(generator.feed(tokens.first(options_.prompt)));
    for (std::size_t t = options_.prompt; t < tokens.size(); ++t) keep(generator.feed(tokens.subspan(t, 1)));
    return all;
  }

  const GeneratorOptions options_;
  Generator generator;
  std::unique_ptr<FakeEngine> engine;
};

double loss_of(const std::vector<float>& logits, std::uint32_t target) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  return std::log(sum) - logits[target];
}

TEST(Generator, TokenByTokenItHasTheLossOfTheTrainer) {
  for (const auto& [name, model] : models()) {
    SCOPED_TRACE(name);
    Resident trained(model, {.sequence = kTokens, .threads = 2});
    const std::vector<std::uint32_t> row = some_tokens(model);
    const double wanted = trained.trainer.run_step(row);
    for (const std::uint32_t prompt : {1u, 40u}) {
      Running run(model, trained, {.prompt = prompt, .slice = 16, .threads = 2});
      const auto logits = run.feed(std::span(row).first(kTokens));
      // The loss of what is after the prompt; the trainer's is of all, and so is that of a prompt of one.
      double sum = 0;
      for (std::size_t i = 0; i < logits.size(); ++i) sum += loss_of(logits[i], row[prompt + i]);
      if (prompt == 1) {
        EXPECT_NEAR(sum / kTokens, wanted, 2e-6 * wanted);
      }
      EXPECT_EQ(run.generator.fed(), kTokens);
      EXPECT_EQ(run.engine->open_leases(), 0);
    }
  }
}

// Slices of a prompt differ in the order of sums alone.
TEST(Generator, APromptHasTheLogitsOfItsTokensOneByOne) {
  for (const auto& [name, model] : models()) {
    SCOPED_TRACE(name);
    const Resident weights(model, {.sequence = kTokens, .threads = 2});
    const std::vector<std::uint32_t> row = some_tokens(model);
    const auto last = [&, &model = model](std::uint32_t prompt, std::uint32_t slice) {
      return Running(model, weights, {.prompt = prompt, .slice = slice, .threads = 2})
          .feed(std::span(row).first(kTokens))
          .back();
    };
    const std::vector<float> wanted = last(1, 1);
    for (const auto& [prompt, slice] : {std::pair{kTokens, 256u}, {kTokens, 64u}, {kTokens, 7u}, {33u, 5u}}) {
      const std::vector<float> found = last(prompt, slice);
      for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(found[i], wanted[i], 1e-4) << prompt << " " << slice;
    }
  }
}

TEST(Generator, LogitsHaveTheSameBitsWhereverKeysAndValuesAre) {
  const TempDirectory folder;
  for (const auto& [name, model] : models()) {
    std::vector<DType> types = {DType::kBFloat16};
    if (name == "qwen3") types = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
    for (const DType type : types) {
      SCOPED_TRACE(name + std::string(" ") + std::to_string(static_cast<int>(type)));
      const Resident weights(model, {.type = type, .sequence = kTokens, .threads = 2});
      const std::vector<std::uint32_t> row = some_tokens(model);
      std::optional<std::vector<std::vector<float>>> wanted;
      for (const Placement tier : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
        for (const unsigned threads : {1u, 2u}) {
          Running run(model, weights,
                      {.type = type, .prompt = 37, .slice = 10, .threads = threads, .cache = {tier, folder.path()}});
          const auto found = run.feed(std::span(row).first(kTokens));
          if (!wanted) wanted = found;
          EXPECT_EQ(*wanted, found) << static_cast<int>(tier) << " " << threads;
        }
      }
    }
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the file has no name";
}

TEST(Generator, AHeadOfItsOwnLeavesTheEmbeddingOutOfTheEngine) {
  for (const auto& [name, model] : models()) {
    SCOPED_TRACE(name);
    const bool tied = model.head_block == kEmbeddingBlock;
    const Generator generator(model, {.prompt = 4, .positions = 9}, [](std::uint32_t, std::span<float>) {});
    EXPECT_EQ(generator.first_block(), tied ? 0u : 1u);
    const ModelDescription& description = generator.description();
    EXPECT_EQ(description.visits.size(), model.layers.size() + (tied ? 2 : 1));
    for (const Block& block : description.blocks)
      for (const Parameter& parameter : block.parameters) EXPECT_FALSE(parameter.trainable) << parameter.name;
  }
}

}  // namespace
}  // namespace spillway::models::generate
