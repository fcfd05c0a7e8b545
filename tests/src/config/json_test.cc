#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "spillway/config.h"
#include "spillway/error.h"
#include "src/config/table.h"
#include "tests/seed.h"
#include "tests/src/config/config_text.h"
#include "tests/src/model_directory.h"

namespace spillway {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Everything in a Config, for comparison.
std::string dump(const Config& c) {
  std::ostringstream out;
  const auto optional = [](const auto& value) { return value ? std::to_string(*value) : std::string("-"); };
  out << c.micro_batch << ' ' << c.gradient_accumulation << ' ' << c.gradient_clipping << ' ' << name_of(c.weights)
      << " | " << c.optimizer.learning_rate << ' ' << c.optimizer.beta1 << ' ' << c.optimizer.beta2 << ' '
      << c.optimizer.epsilon << ' ' << c.optimizer.weight_decay << ' ' << c.optimizer.decoupled_decay << ' '
      << c.optimizer.bias_correction << " | " << int(c.schedule.kind) << ' ' << c.schedule.warmup_min_lr << ' '
      << c.schedule.warmup_max_lr << ' ' << c.schedule.warmup_steps << ' ' << c.schedule.total_steps << ' '
      << c.schedule.logarithmic_warmup << ' ' << c.schedule.warmup_min_ratio << ' ' << c.schedule.cosine_min_ratio
      << " | " << int(c.states) << ' ' << int(c.parameters) << ' ' << c.nvme_paths.size() << ' '
      << (c.nvme_paths.empty() ? "" : c.nvme_paths[0].string()) << ' ' << c.io_block_bytes << ' ' << c.io_depth << " | "
      << optional(c.hbm_bytes) << ' ' << optional(c.host_bytes) << ' ' << optional(c.nvme_bytes) << ' '
      << c.tile_elements << ' ' << optional(c.commit_every) << ' ' << optional(c.speculative_blocks) << ' ' << c.threads
      << ' ' << int(c.io_engine) << " | " << name_of(c.optimizer.kind) << ' ' << c.optimizer.momentum << ' '
      << c.optimizer.dampening << ' ' << c.optimizer.nesterov << ' ' << c.no_decay << ' ' << c.sum_groups << " | "
      << c.loss_scale.fixed << ' ' << c.loss_scale.initial_power << ' ' << c.loss_scale.window << ' '
      << c.loss_scale.hysteresis << ' ' << c.loss_scale.consecutive_hysteresis << ' ' << c.loss_scale.least << " | "
      << name_of(c.moments) << ' ' << c.optimizer.seed;
  for (const std::string& name : c.exact_states) out << ' ' << name;
  for (const ParameterGroup& group : c.parameter_groups) {
    out << " [";
    for (const std::string& name : group.parameters) out << name << ' ';
    out << optional(group.learning_rate) << ' ' << optional(group.weight_decay) << ']';
  }
  return out.str();
}

TEST(ConfigJson, AdaptersHaveASectionOfTheirOwn) {
  const Config c = parse(R"({"train_micro_batch_size_per_gpu": 1, "spillway": {"lora": {
      "rank": 3, "alpha": 0.5, "targets": ["q_proj", "h.1.c_fc"], "seed": 9, "dropout": 0.0}}})");
  EXPECT_EQ(c.lora.rank, 3u);
  EXPECT_EQ(c.lora.alpha, 0.5);
  EXPECT_THAT(c.lora.targets, testing::ElementsAre("q_proj", "h.1.c_fc"));
  EXPECT_EQ(c.lora.seed, 9u);
  EXPECT_TRUE(c.lora.given());
  EXPECT_FALSE(parse(with("\"optimizer\": {}")).lora.given());
  for (const ConfigKey& key : config_keys()) {
    if (!key.path.starts_with("spillway.lora.") || key.standard.empty()) continue;
    const std::string written = ", \"" + std::string(leaf_of(key.path)) + "\": " + std::string(key.standard);
    const auto adapters = [&](const std::string& more) {
      const LoraConfig lora = parse(with("\"spillway\": {\"lora\": {\"targets\": [\"a\"]" + more + "}}")).lora;
      return std::tuple(lora.rank, lora.alpha, lora.seed);
    };
    EXPECT_EQ(adapters(written), adapters("")) << key.path;
  }
}

TEST(ConfigJson, EveryKeyReachesItsPlace) {
  const Config c = parse(R"({
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 6,
    "gradient_clipping": 0.5, "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0.5,
    "initial_scale_power": 9, "loss_scale_window": 5e2, "hysteresis": 4, "consecutive_hysteresis": true,
    "min_loss_scale": 0.25},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1,
                                              "bias_correction": false}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4,
                  "warmup_num_steps": 20, "total_num_steps": 5e3, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},
                          "offload_param": {"device": "cpu"}},
    "aio": {"block_size": 262144, "queue_depth": 64},
    "spillway": {"hbm_bytes": "512MiB", "host_bytes": 1e9, "nvme_bytes": "1.5 TiB", "tile_elements": 2048,
                 "commit_every": 0, "speculative_blocks": 7, "threads": 3, "io_engine": "threads", "no_decay": true,
                 "sum_groups": 2, "states": "int8", "exact_states": ["*.ln*"], "rounding_seed": 11,
                 "parameter_groups": [{"parameters": ["*.ln*", "wte"], "lr": 0.5},
                                      {"parameters": ["h.*"], "weight_decay": 2}]}
  })");
  EXPECT_EQ(dump(c),
            "4 6 0.5 bf16 | 0.0002 0.8 0.95 1e-07 0.1 1 0 | 2 1e-06 0.0003 20 5000 0 0 0.0001 | "
            "2 1 1 /n 262144 64 | 536870912 1000000000 1649267441664 2048 0 7 3 3 | "
            "Adam 0 0 0 1 2 | 0.5 9 500 4 1 0.25 | int8 11 *.ln* [*.ln* wte 0.500000 -] [h.* - 2.000000]");
}

TEST(ConfigJson, WhatIsLeftOutTakesTheDefault) {
  Config defaults;
  EXPECT_EQ(dump(parse("{\"train_batch_size\": 1}")), dump(defaults));
}

TEST(ConfigJson, TheTablesDefaultsAreTheDefaults) {
  // Each row with its own default written out must say the same as without it.
  for (const ConfigKey& key : config_keys()) {
    if (key.standard.empty()) continue;
    std::string text(key.standard);
    std::string path(key.path);
    for (std::size_t dot = path.rfind('.'); dot != std::string::npos; dot = path.rfind('.')) {
      text = "{\"" + path.substr(dot + 1) + "\": " + text + "}";
      path.resize(dot);
    }
    text = "\"" + path + "\": " + text;
    if (key.path.starts_with("scheduler.")) continue;      // a schedule needs its type, see the next test
    if (key.path.starts_with("spillway.lora.")) continue;  // adapters need targets
    std::string plain = "\"optimizer\": {}";
    if (!key.only_for.empty()) {  // of an optimizer's type
      const std::string type = "{\"type\": \"" + std::string(choices_of(key.only_for).front()) + "\"";
      plain = "\"optimizer\": " + type + "}";
      text.replace(text.find('{'), 1, type + ", ");
    }
    EXPECT_EQ(dump(parse(with(text))), dump(parse(with(plain)))) << key.path;
  }
}

TEST(ConfigJson, TheTablesDefaultsOfAScheduleAreTheDefaults) {
  for (const ConfigKey& key : config_keys()) {
    if (key.standard.empty() || !key.path.starts_with("scheduler.params.")) continue;
    const std::string leaf(key.path.substr(17));
    const bool cosine = key.only_for == "WarmupCosineLR";
    const std::string type = cosine ? "WarmupCosineLR" : "WarmupDecayLR";
    const auto text = [&](const std::string& more) {
      return with("\"scheduler\": {\"type\": \"" + type + "\", \"params\": {\"total_num_steps\": 9000" + more + "}}");
    };
    EXPECT_EQ(dump(parse(text(", \"" + leaf + "\": " + std::string(key.standard)))), dump(parse(text("")))) << key.path;
  }
}

TEST(ConfigJson, EveryRowSaysWhatItIsAndIsFoundOnce) {
  std::set<std::string_view> seen;
  for (const auto& table : {config_keys(), config_keys_without_effect()}) {
    for (const ConfigKey& key : table) {
      EXPECT_TRUE(seen.insert(key.path).second) << key.path;
      EXPECT_FALSE(key.doc.empty()) << key.path;
      const bool allows = key.kind == KeyKind::kChoice || key.kind == KeyKind::kOnly;
      EXPECT_TRUE(key.kind == KeyKind::kOff || key.allowed.empty() != allows) << key.path;
      const std::size_t dot = key.path.rfind('.');
      if (dot == std::string_view::npos) continue;
      const ConfigKey* section = find_config_key(key.path.substr(0, dot));
      EXPECT_TRUE(section != nullptr && (section->kind == KeyKind::kSection || section->kind == KeyKind::kSections))
          << key.path << " has no section";
    }
  }
}

TEST(ConfigJson, BatchSizesAreDerivedAsDeepSpeedDoes) {
  const auto batch = [](const std::string& text) {
    const Config c = parse(text);
    return std::pair(c.micro_batch, c.gradient_accumulation);
  };
  EXPECT_EQ(batch(R"({"train_batch_size": 12})"), std::pair(12u, 1u));
  EXPECT_EQ(batch(R"({"train_micro_batch_size_per_gpu": 3})"), std::pair(3u, 1u));
  EXPECT_EQ(batch(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3})"), std::pair(3u, 4u));
  EXPECT_EQ(batch(R"({"train_batch_size": 12, "gradient_accumulation_steps": 6})"), std::pair(2u, 6u));
  EXPECT_EQ(batch(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2})"), std::pair(3u, 2u));
}

TEST(ConfigJson, BatchSizesThatContradictEachOtherAreRefused) {
  EXPECT_THAT(refusal("{}"), HasSubstr("c.json:1:1: neither train_batch_size nor"));
  EXPECT_THAT(refusal(R"({"gradient_accumulation_steps": 2})"), HasSubstr("neither"));
  EXPECT_EQ(refusal(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})"),
            "c.json:1:22: train_batch_size: 10 is not 4 (micro batch) × 2 (accumulation) × 1 (rank); it must be a "
            "multiple of 4");
  EXPECT_THAT(refusal(R"({"train_batch_size": 2, "gradient_accumulation_steps": 4})"), HasSubstr("a multiple of 4"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 3})"), HasSubstr("a multiple of 3"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                          "gradient_accumulation_steps": 2})"),
              HasSubstr("(rank); gradient_accumulation_steps 4 keeps the batch, on however many GPUs it was"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3,
                          "gradient_accumulation_steps": 2})"),
              HasSubstr("6 would be"));
  EXPECT_THAT(refusal(R"({"train_micro_batch_size_per_gpu": 4294967295, "gradient_accumulation_steps": 4294967295})"),
              HasSubstr("too many"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 0})"), HasSubstr("out of range; allowed: 1 to"));
}

TEST(ConfigJson, SchedulesTakeTheirOwnParametersOnly) {
  const Config warmup = parse(with(R"("optimizer": {"params": {"lr": 0.5}}, "scheduler": {"type": "WarmupLR"})"));
  EXPECT_EQ(warmup.schedule.kind, ScheduleKind::kWarmup);
  EXPECT_EQ(warmup.schedule.warmup_max_lr, 0.5);  // WarmupLR: the optimizer's own rate
  const Config decay = parse(with(R"("optimizer": {"params": {"lr": 0.5}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9000}})"));
  EXPECT_EQ(decay.schedule.warmup_max_lr, 1e-3);  // WarmupDecayLR: 1e-3, whatever the optimizer says
  const Config cosine = parse(with(R"("scheduler": {"type": "WarmupCosineLR",
      "params": {"total_num_steps": 9000, "warmup_min_ratio": 0.25, "cos_min_ratio": 0.125}})"));
  EXPECT_EQ(cosine.schedule.kind, ScheduleKind::kWarmupCosine);
  EXPECT_EQ(cosine.schedule.warmup_min_ratio, 0.25);
  EXPECT_EQ(cosine.schedule.cosine_min_ratio, 0.125);

  const auto refused = [](const std::string& scheduler) { return refusal(with("\"scheduler\": " + scheduler)); };
  EXPECT_THAT(refused(R"({"type": "WarmupLR", "params": {"total_num_steps": 5}})"),
              HasSubstr("scheduler.params.total_num_steps: not a parameter of WarmupLR; only of WarmupDecayLR"));
  EXPECT_THAT(refused(R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 5000, "warmup_min_lr": 0}})"),
              HasSubstr("not a parameter of WarmupCosineLR"));
  EXPECT_THAT(refused(R"({"type": "WarmupDecayLR"})"), HasSubstr("needs scheduler.params.total_num_steps"));
  EXPECT_THAT(refused(R"({"params": {}})"), HasSubstr("the section has no type; allowed: WarmupLR"));
  EXPECT_THAT(refused(R"({"type": "OneCycle"})"), HasSubstr("allowed: WarmupLR, WarmupDecayLR, WarmupCosineLR"));
  EXPECT_EQ(parse(with(R"("scheduler": null)")).schedule.kind, ScheduleKind::kConstant);
}

TEST(ConfigJson, OffloadNeedsStage3AndNvmeAPath) {
  const auto zero = [](const std::string& section) { return with("\"zero_optimization\": " + section); };
  EXPECT_THAT(refusal(zero(R"({"offload_param": {"device": "cpu"}})")), HasSubstr("need a stage; add \"stage\": 3"));
  EXPECT_THAT(refusal(zero(R"({"stage": 3, "offload_optimizer": {"device": "nvme"}})")),
              HasSubstr("offload_optimizer.device: device nvme needs an nvme_path"));
  EXPECT_THAT(refusal(zero(R"({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ""}})")),
              HasSubstr("needs an nvme_path"));
  EXPECT_THAT(refusal(zero(R"({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"},
                               "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}})")),
              HasSubstr("\"/a\" differs from offload_optimizer.nvme_path, \"/b\""));
  const Config one = parse(zero(R"({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": null},
                                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}})"));
  EXPECT_THAT(one.nvme_paths, ElementsAre("/b"));
  EXPECT_EQ(one.parameters, Placement::kNvme);
  const auto paths = [](const std::string& spillway, const std::string& path = R"("nvme_path": "/a")") {
    return R"({"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme")" +
           (path.empty() ? "" : ", " + path) + R"(}}, "spillway": {)" + spillway + "}}";
  };
  const Config two = parse(paths(R"("nvme_paths": ["/a", "/b"], "nvme_rates": [2.5, 1])"));
  EXPECT_THAT(two.nvme_paths, ElementsAre("/a", "/b"));
  EXPECT_THAT(two.nvme_rates, ElementsAre(2.5, 1));
  EXPECT_THAT(parse(paths(R"("nvme_paths": ["/c"])", "")).nvme_paths, ElementsAre("/c"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/b", "/a"])")), HasSubstr("\"/b\" is first, and nvme_path is \"/a\""));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/a", "/a"])")), HasSubstr("\"/a\" is named twice"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": [])", "")), HasSubstr("no path is named"));
  for (const char* wrong : {R"([])", R"([""])", R"(["/b", "/b"])", R"(["/b", "/a"])"})  // and nothing else
    EXPECT_THAT(refusal(paths(std::string(R"("nvme_paths": )") + wrong)), Not(HasSubstr("offload_param"))) << wrong;
  EXPECT_THAT(refusal(paths(R"("nvme_paths": "/a")")), HasSubstr("expected an array of strings"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/a", 2])")), HasSubstr("expected a string, found 2"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/a", "/b"], "nvme_rates": [1])")), HasSubstr("1 rates for 2 paths"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/a", "/b"], "nvme_rates": [1, 0])")), HasSubstr("0 is out of range"));
  EXPECT_THAT(
      refusal(paths(R"("tile_elements": 1024)", R"("nvme_path": "~/x")")),
      HasSubstr("offload_param.nvme_path: ~/x would be a directory of that name: only shells know ~; name the"));
  EXPECT_THAT(refusal(paths(R"("nvme_paths": ["/a", "~"])", "")), HasSubstr("spillway.nvme_paths: ~ would be"));
  EXPECT_THAT(parse(paths(R"("nvme_paths": ["~a"])", "")).nvme_paths, ElementsAre("~a"));
  EXPECT_EQ(parse(zero(R"({"stage": 3, "offload_param": null})")).parameters, Placement::kHbm);
  const Config older = parse(zero(R"({"stage": 3, "cpu_offload": true, "cpu_offload_param": true})"));
  EXPECT_EQ(older.states, Placement::kHost);
  EXPECT_EQ(older.parameters, Placement::kHost);
}

TEST(ConfigJson, Fp16HasDeepSpeedsKeysAndItsContradictionsAreRefused) {
  const auto fp16 = [](const std::string& more) { return with("\"fp16\": {\"enabled\": true" + more + "}"); };
  CapturedLog log;
  EXPECT_EQ(parse(fp16("")).weights, DType::kFloat16);
  EXPECT_EQ(parse(with(R"("fp16": {"loss_scale": 128})")).weights, DType::kFloat32);
  EXPECT_EQ(refusal(with(R"("bf16": {"enabled": true}, "fp16": {"enabled": true})")),
            "c.json:1:72: fp16.enabled: contradicts bf16.enabled; enable one of the two");
  EXPECT_THAT(refusal(fp16(R"(, "initial_scale_power": 2, "min_loss_scale": 8)")),
              HasSubstr("fp16.min_loss_scale: 8 is above the scale that it begins with, 2^2; raise"));
  EXPECT_THAT(refusal(fp16(R"(, "loss_scale": -1)")), HasSubstr("fp16.loss_scale: -1 is out of range"));
  EXPECT_THAT(refusal(fp16(R"(, "loss_scale_window": 0)")), HasSubstr("fp16.loss_scale_window: 0 is out of range"));
  EXPECT_THAT(refusal(fp16(R"(, "hysteresis": 0)")), HasSubstr("fp16.hysteresis: 0 is out of range"));
  EXPECT_THAT(refusal(fp16(R"(, "min_loss_scale": 0)")), HasSubstr("fp16.min_loss_scale: 0 is out of range"));
  EXPECT_THAT(refusal(fp16(R"(, "initial_scale_power": 65)")), HasSubstr("fp16.initial_scale_power: 65 is out of"));
  EXPECT_THAT(log.lines, IsEmpty());
  parse(fp16(R"(, "loss_scale": 128, "hysteresis": 2, "min_loss_scale": 1)"));
  EXPECT_THAT(log.lines,
              ElementsAre("fp16.loss_scale 128 is static: without effect are fp16.hysteresis, fp16.min_loss_scale"));
  log.lines.clear();
  parse(fp16(R"(, "auto_cast": false, "fp16_master_weights_and_grads": false)"));
  EXPECT_THAT(log.lines, ElementsAre("c.json: known, but without effect here: fp16.auto_cast, "
                                     "fp16.fp16_master_weights_and_grads"));
}

TEST(ConfigJson, UnknownKeysNameTheClosestOne) {
  EXPECT_EQ(refusal(with(R"("gradient_cliping": 1)")),
            "c.json:1:25: unknown key \"gradient_cliping\"; closest key: gradient_clipping");
  EXPECT_THAT(refusal(with(R"("zero_optimization": {"offload_optimizer": {"nvmepath": "/x"}})")),
              HasSubstr("unknown key \"zero_optimization.offload_optimizer.nvmepath\"; closest key: nvme_path"));
  // At home in another section.
  EXPECT_THAT(refusal(with(R"("zero_optimization": {"aio": {}})")), HasSubstr("closest key: aio"));
  EXPECT_THAT(refusal(with(R"("hbm_bytes": 1)")), HasSubstr("closest key: spillway.hbm_bytes"));
  EXPECT_THAT(refusal(with(R"("aio": {"qwertyuiop": 1})")), HasSubstr("known keys: block_size, queue_depth"));
  // A dotted name is not a path.
  EXPECT_THAT(refusal(with(R"("aio.block_size": 4096)")), HasSubstr("unknown key \"aio.block_size\""));
}

TEST(ConfigJson, WrongTypesAndRangesSayWhatIsAllowed) {
  const auto refused = [](const std::string& more) { return refusal(with(more)); };
  EXPECT_THAT(refused(R"("gradient_clipping": "1")"), HasSubstr("expected a number, found the string \"1\""));
  EXPECT_THAT(refused(R"("aio": {"queue_depth": "auto"})"), HasSubstr("\"auto\" is not filled in here"));
  EXPECT_THAT(refused(R"("gradient_clipping": -1)"), HasSubstr("-1 is out of range; allowed: at least 0"));
  EXPECT_THAT(refused(R"("gradient_clipping": 1e39)"), HasSubstr("1e+39 is out of range; allowed: at most 1e+38"));
  EXPECT_THAT(refused(R"("gradient_clipping": null)"), HasSubstr("found null"));
  EXPECT_THAT(refused(R"("bf16": {"enabled": "true"})"),
              HasSubstr("expected true or false, found the string \"true\"; write true, without quotes"));
  EXPECT_THAT(refused(R"("bf16": true)"), HasSubstr("expected an object, found true"));
  EXPECT_THAT(refused(R"("optimizer": {"params": {"betas": [0.9]}})"), HasSubstr("two numbers, such as [0.9, 0.999]"));
  EXPECT_THAT(refused(R"("optimizer": {"params": {"betas": [0.9, 1]}})"), HasSubstr("less than 1"));
  EXPECT_THAT(refused(R"("optimizer": {"params": {"lr": 1e400}})"), HasSubstr("c.json:1:"));
  EXPECT_THAT(refused(R"("aio": {"queue_depth": 2.5})"), HasSubstr("expected a whole number, found 2.5"));
  EXPECT_THAT(refused(R"("aio": {"queue_depth": 0})"), HasSubstr("allowed: 1 to 4096"));
  EXPECT_THAT(refused(R"("aio": {"block_size": 5000})"), HasSubstr("not a multiple of 4096; nearest below: 4096"));
  EXPECT_THAT(refused(R"("spillway": {"tile_elements": 1000})"), HasSubstr("out of range"));
  EXPECT_THAT(refused(R"("spillway": {"io_engine": "iouring"})"), HasSubstr("closest: io_uring"));
  for (const char* bytes :
       {"12 parsecs", "-1MiB", "1.5", "0.1KiB", "MiB", "", "nan", "inf", "1e400GiB", "9e99", "1MiBx"}) {
    EXPECT_THAT(refused(std::string(R"("spillway": {"hbm_bytes": ")") + bytes + "\"}"), HasSubstr("\"512MiB\""))
        << bytes;
  }
  EXPECT_THAT(refused(R"("zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "a\u0000b"}})"),
              HasSubstr("zero byte"));
}

TEST(ConfigJson, WholeNumbersMayBeWrittenWithAnExponent) {
  EXPECT_EQ(parse(with(R"("spillway": {"hbm_bytes": 5e7})")).hbm_bytes, 50'000'000u);
  // Beyond 2^53 a whole number written out keeps its last digit.
  EXPECT_EQ(parse(with(R"("spillway": {"hbm_bytes": 9007199254740993})")).hbm_bytes, 9007199254740993u);
}

TEST(ConfigJson, NumbersAreReadExactlyOrRefused) {
  const auto clipping = [](const std::string& number) { return with("\"gradient_clipping\": " + number); };
  EXPECT_EQ(parse(clipping("0.1")).gradient_clipping, 0.1);
  EXPECT_EQ(parse(clipping("8.7654321e-05")).gradient_clipping, 8.7654321e-05);
  EXPECT_EQ(parse(clipping("0.500000000000000166533453693773481063544750213623046875")).gradient_clipping,
            0x1.0000000000002p-1);
  EXPECT_EQ(parse(clipping("-0")).gradient_clipping, 0);
  EXPECT_EQ(parse(clipping("0e+300")).gradient_clipping, 0);
  EXPECT_EQ(parse(with("\"spillway\": {\"hbm_bytes\": 999999999999999999}")).hbm_bytes, 999'999'999'999'999'999u);
  EXPECT_THAT(refusal(clipping("1e999")), HasSubstr("c.json:1:46: not JSON: Number too big"));
  for (const std::string& number : {std::string(60, '7') + "e300", "1" + std::string(300, '0') + "e308",
                                    std::string("1e-400"), std::string("-9e-999")}) {
    EXPECT_THAT(refusal(clipping(number)), HasSubstr("c.json:1:46: a number that is too large or too small")) << number;
  }
}

TEST(ConfigJson, AllErrorsAreReportedInOneRunInTheOrderOfTheText) {
  EXPECT_EQ(refusal("{\n  \"train_batch_size\": 7,\n  \"gradient_cliping\": 1, \"bf16\": {\"enabled\": 1},\n"
                    "  \"train_micro_batch_size_per_gpu\": 2,\n  \"bf16\": {}\n}"),
            "c.json:2:23: train_batch_size: 7 is not 2 (micro batch) × 3 (accumulation) × 1 (rank); it must be a "
            "multiple of 2\n"
            "c.json:3:3: unknown key \"gradient_cliping\"; closest key: gradient_clipping\n"
            "c.json:3:46: bf16.enabled: expected true or false, found 1; write true\n"
            "c.json:5:3: duplicate key \"bf16\"; it stands in line 3 already");
}

TEST(ConfigJson, AWrongValueIsNotReportedAsMissingToo) {
  EXPECT_EQ(refusal(R"({"train_batch_size": "x"})"),
            "c.json:1:22: train_batch_size: expected a whole number, found the string \"x\"; write a whole number");
  EXPECT_THAT(refusal(with(R"("scheduler": {"type": 1})")), testing::Not(HasSubstr("\n")));
  EXPECT_THAT(refusal(with(R"("zero_optimization": {"stage": "3", "offload_param": {"device": "cpu"}})")),
              testing::Not(HasSubstr("\n")));
  EXPECT_THAT(
      refusal(with(R"("zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": 1}})")),
      testing::Not(HasSubstr("\n")));
  EXPECT_THAT(refusal(with(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "x"}})")),
              testing::Not(HasSubstr("\n")));
}

TEST(ConfigJson, ColumnsCountCharactersAndCommentsAreSkipped) {
  EXPECT_THAT(refusal("// größer, \"x\": 1\n{/* ü */ \"train_batch_size\": 1, \"ü\": 1}"),
              HasSubstr("c.json:2:33: unknown key"));
  EXPECT_EQ(refusal("{\"train_batch_size\": 1,}"), "accepted");  // DeepSpeed's reader takes it as well
}

TEST(ConfigJson, TextsThatAreNotAConfigurationAreRefusedWithTheirPlace) {
  EXPECT_THAT(refusal(""), HasSubstr("c.json:1:1: "));
  EXPECT_THAT(refusal("[]"), HasSubstr("c.json:1:1: a configuration is a JSON object"));
  EXPECT_THAT(refusal("{\n\"a\" 1}"), HasSubstr("c.json:2:5: not JSON: Missing a colon"));
  EXPECT_THAT(refusal("{} {}"), HasSubstr("c.json:1:4: "));
  EXPECT_THAT(refusal(std::string("{}\0{}", 5)), HasSubstr("a zero byte"));
  EXPECT_THAT(refusal(R"({"a": "\udc00"})"), HasSubstr("c.json:1:7: a string with half of a surrogate pair"));
  EXPECT_THAT(refusal(R"({"\udfff": 1})"), HasSubstr("c.json:1:2: a string with half of a surrogate pair"));
  EXPECT_THAT(refusal(with("\"aio\": " + std::string(100'000, '['))), HasSubstr("nested deeper than 64"));
  std::string many = "[0";
  for (int i = 0; i < 100'000; ++i) many += ",0";
  EXPECT_THAT(refusal(with("\"checkpoint\": " + many + "]")), HasSubstr("more than 100000 values"));
  EXPECT_THAT(refusal("{\"\xff\": 1}"), HasSubstr("encoding"));
}

TEST(ConfigJson, KeysWithoutEffectAreNamedInOneLogLine) {
  CapturedLog log;
  parse(R"({"train_batch_size": 1, "steps_per_print": null, "zero_optimization": {"stage": 3,
    "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto",
    "offload_optimizer": {"device": "cpu", "pin_memory": true, "buffer_size": 4}},
    "aio": {"thread_count": 2}, "fp16": {"auto_cast": true}})");
  EXPECT_THAT(
      log.lines,
      ElementsAre("c.json: older or other names: aio.thread_count, now aio.intra_op_parallelism",
                  "c.json: \"auto\" leaves it to the plan: zero_optimization.stage3_prefetch_bucket_size",
                  "c.json: known, but without effect here: zero_optimization.reduce_bucket_size, "
                  "zero_optimization.offload_optimizer.pin_memory, zero_optimization.offload_optimizer.buffer_size, "
                  "aio.thread_count, fp16.auto_cast"));
  log.lines.clear();
  parse(with("\"gradient_clipping\": 1"));
  EXPECT_THAT(log.lines, IsEmpty());
  // Their types are checked all the same.
  EXPECT_THAT(refusal(with(R"("aio": {"single_submit": "true"})")), HasSubstr("expected true or false"));
}

TEST(ConfigJson, RandomDamageToATextIsReportedOrAcceptedNeverACrash) {
  const CapturedLog log;
  const std::string whole =
      R"({"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.95]}},
    // a comment
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}, "spillway": {"hbm_bytes": "1.5GiB"},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}, "aio": {}})";
  const std::string marks = "{}[]\",:/*.-+eE0 9\\\n\xc3";
  std::mt19937_64 random(test_seed());
  int accepted = 0;
  for (int round = 0; round < 4'000; ++round) {
    std::string damaged = whole;
    for (std::uint64_t n = random() % 3; n > 0; --n) {
      const std::size_t at = random() % damaged.size();
      if (random() % 4 == 0) damaged.erase(at, random() % 9);
      damaged.insert(std::min(at, damaged.size()), 1, marks[random() % marks.size()]);
    }
    const std::string message = refusal(damaged);
    accepted += message == "accepted";
    // Every line of a report has its place.
    std::istringstream lines(message == "accepted" ? "" : message);
    for (std::string line; std::getline(lines, line) && line.starts_with("c.json");) {
      ASSERT_THAT(line, testing::ContainsRegex("^c.json:[0-9]+:[0-9]+: ")) << damaged;
    }
  }
  EXPECT_TRUE(accepted > 200 && accepted < 3'800) << accepted;
}

using LoadConfig = ModelDirectory;

TEST_F(LoadConfig, ErrorsNameTheFile) {
  write_file("ds_config.json", "{\n \"x\": 1, \"train_batch_size\": 1}");
  const std::filesystem::path path = directory_ / "ds_config.json";
  const auto message = [](const std::filesystem::path& file) {
    try {
      load_config(file);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(message(path), HasSubstr(path.string() + ":2:2: unknown key \"x\""));
  write_file("ds_config.json", "{\"train_batch_size\": 3}");
  EXPECT_EQ(load_config(path).micro_batch, 3u);
  EXPECT_THAT(message(directory_ / "none.json"), HasSubstr("No such file or directory"));
  EXPECT_THAT(message(directory_), HasSubstr(directory_.string() + ": "));
  std::filesystem::resize_file(path, 5 << 20);
  EXPECT_THAT(message(path), HasSubstr("at most 4194304"));
}

TEST(ConfigJson, ATextThatIsWrongEverywhereIsNotReadToItsEnd) {
  std::string text = "{";
  for (int i = 0; i < 50'000; ++i) text += "\"a\": 0,\n";
  const std::string said = refusal(text + "\"b\": 0}");
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 100);
  EXPECT_THAT(said, HasSubstr("c.json:100:1: duplicate key \"a\""));
  EXPECT_THAT(said, testing::EndsWith("c.json: what follows was not looked at; correct these first"));
  // One error less, and the rest counts.
  text = "{\"train_batch_size\": 0";
  for (int i = 0; i < 98; ++i) text += ", \"a" + std::to_string(i) + "\": 0";
  EXPECT_THAT(refusal(text + "}"), testing::Not(HasSubstr("what follows")));
}

class PathsOfDrives : public ModelDirectory {
 protected:
  std::string paths(const std::string& first, const std::string& second) const {
    return refusal(with("\"spillway\": {\"nvme_paths\": [" + json_string((directory_ / first).string()) + ", " +
                        json_string((directory_ / second).string()) + "]}"));
  }
};

TEST_F(PathsOfDrives, MayNotBeOneUnderTwoNames) {
  std::filesystem::create_directory(directory_ / "a");
  std::filesystem::create_directory_symlink("a", directory_ / "link");
  for (const char* name : {"a/", "./a", "a/.", "link", "link/", "b/../a"}) {
    EXPECT_THAT(paths("a", name), HasSubstr("a\" is named twice, once as \"")) << name;
  }
  EXPECT_THAT(paths("link/new", "a/new"), HasSubstr("new\" is named twice")) << "not there yet, and one directory";
  EXPECT_EQ(paths("a", "b"), "accepted");
  EXPECT_EQ(paths("a/new", "new"), "accepted");
}

TEST(ConfigJson, TheQueueHasADepthForAllPathsTogether) {
  const auto said = [](const char* depth) {
    return refusal(
        with(std::string(R"("aio": {"queue_depth": )") + depth + R"(}, "spillway": {"nvme_paths": ["/a", "/b"]})"));
  };
  EXPECT_EQ(said("2048"), "accepted");
  EXPECT_THAT(said("2049"), HasSubstr("c.json:1:48: aio.queue_depth: 2049 for each of 2 paths; choose 1 to 2048"));
}

}  // namespace
}  // namespace spillway
