#include "src/plan/description.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "spillway/error.h"
#include "src/formats/plain_file.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

ModelDescription some_model() {
  ModelDescription model;
  model.blocks = {{"first \"block\"\n", {{.name = "wte", .shape = {5, 7}}, {.name = "scale", .shape = {}}}},
                  {"h.0", {{.name = "ünïcode/\\", .shape = {1, 2, 3}, .trainable = false}}}};
  model.blocks[1].parameters.push_back({.name = std::string("zero\0inside", 11), .shape = {1ull << 54}});
  model.attachments = {{"config.json", "{\"a\": [1, 2]}\n"}, {"empty", ""}, {"bytes", std::string("\0\1\2\x7f", 4)}};
  return model;
}

Config some_config() {
  Config config;
  config.weights = DType::kBFloat16;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  config.tile_elements = 5 * 1024;
  return config;
}

bool refused(const std::string& text) {
  try {
    parse_store_description(text, "/drive/spillway.store");
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == Code::kCorrupt || error.code() == Code::kUnsupported);  // the latter: other states
    EXPECT_EQ(error.parts().object, "/drive/spillway.store");
    return true;
  }
  return false;
}

TEST(StoreDescription, ComesBackAsItWasWritten) {
  const ModelDescription model = some_model();
  const StoreIdentity identity = describe_store(some_config(), model);
  const StoredModel stored = parse_store_description(identity.description, "store");
  EXPECT_EQ(stored.weights, DType::kBFloat16);
  EXPECT_EQ(stored.optimizer, OptimizerKind::kAdagrad);
  EXPECT_EQ(stored.tile_elements, 5u * 1024);
  EXPECT_EQ(stored.fingerprint, identity.fingerprint);
  ASSERT_EQ(stored.model.blocks.size(), model.blocks.size());
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    EXPECT_EQ(stored.model.blocks[b].name, model.blocks[b].name);
    ASSERT_EQ(stored.model.blocks[b].parameters.size(), model.blocks[b].parameters.size());
    for (std::size_t p = 0; p < model.blocks[b].parameters.size(); ++p) {
      const Parameter& expected = model.blocks[b].parameters[p];
      const Parameter& found = stored.model.blocks[b].parameters[p];
      EXPECT_EQ(found.name, expected.name);
      EXPECT_EQ(found.shape, expected.shape);
      EXPECT_EQ(found.trainable, expected.trainable);
    }
  }
  ASSERT_EQ(stored.model.attachments.size(), model.attachments.size());
  for (std::size_t a = 0; a < model.attachments.size(); ++a) {
    EXPECT_EQ(stored.model.attachments[a].name, model.attachments[a].name);
    EXPECT_EQ(stored.model.attachments[a].text, model.attachments[a].text);
  }
}

TEST(StoreDescription, ListsTheArraysOfATilesStates) {
  const StoreIdentity identity = describe_store(some_config(), some_model());
  const std::string states = R"("states":[{"name":"exp_avg_sq","type":"fp32","bytes":4,"group":1,"scale":"none"},)"
                             R"({"name":"master_residual","type":"int16","bytes":2,"group":1,"scale":"none"}])";
  const std::size_t at = identity.description.find(states);
  ASSERT_NE(at, std::string::npos) << identity.description;
  const auto with = [&](const std::string& other) {
    return std::string(identity.description).replace(at, states.size(), other);
  };
  // As older stores have it, and as this one would be written for them.
  const std::string without = identity.as_of_format(identity.description, 3);
  EXPECT_EQ(without.find("states"), std::string::npos);
  EXPECT_EQ(parse_store_description(without, "store").fingerprint, identity.fingerprint);
  EXPECT_EQ(identity.difference(without, identity.description), "");
  EXPECT_EQ(identity.as_of_format(identity.description, 4), identity.description);

  const std::pair<std::string, std::string> unknown[] = {
      {R"("states":[{"name":"momentum_q","type":"int8","bytes":1,"group":64,"scale":"fp16"}])",
       "the state array momentum_q (int8, groups of 64 with a scale of type fp16)"},
      {R"("states":[{"name":"exp_avg_sq","type":"bf16","bytes":2,"group":1,"scale":"none"}])", "exp_avg_sq (bf16"},
      {R"("states":[])", "no state array exp_avg_sq"}};
  for (const auto& [text, named] : unknown) {
    try {
      parse_store_description(with(text), "store");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(parse_store_description(with(R"("states":[{"name":"exp_avg_sq"}])"), "store"), Error);
}

TEST(StoreDescription, TheFingerprintCoversWhateverTheBytesDependOn) {
  const auto fingerprint = [](const std::function<void(Config&, ModelDescription&)>& change) {
    Config config = some_config();
    ModelDescription model = some_model();
    change(config, model);
    return describe_store(config, model).fingerprint;
  };
  const std::uint64_t same = fingerprint([](Config&, ModelDescription&) {});
  const std::function<void(Config&, ModelDescription&)> changes[] = {
      [](Config& config, ModelDescription&) { config.weights = DType::kFloat32; },
      [](Config& config, ModelDescription&) { config.tile_elements = 1024; },
      [](Config& config, ModelDescription&) { config.optimizer.kind = OptimizerKind::kLion; },
      [](Config&, ModelDescription& model) { model.blocks[0].name = "other"; },
      [](Config&, ModelDescription& model) { model.blocks[0].parameters[0].name = "other"; },
      [](Config&, ModelDescription& model) {
        model.blocks[0].parameters[0].shape = {7, 5};
      },
      [](Config&, ModelDescription& model) { model.blocks[0].parameters[0].shape = {35}; },
      [](Config&, ModelDescription& model) { model.blocks[0].parameters[0].trainable = false; },
      [](Config&, ModelDescription& model) { std::swap(model.blocks[0], model.blocks[1]); },
      [](Config&, ModelDescription& model) { model.blocks.pop_back(); },
  };
  for (const auto& change : changes) EXPECT_NE(fingerprint(change), same) << &change - changes;
  EXPECT_EQ(fingerprint([](Config& config, ModelDescription& model) {
              config.optimizer.learning_rate = 3;
              config.hbm_bytes = 5;
              model.attachments.clear();
              model.visits = {{0, Pass::kForward}};
              model.workspace_bytes = 1;
            }),
            same);
}

TEST(StoreDescription, TheDifferenceIsNamed) {
  const std::string stored = describe_store(some_config(), some_model()).description;
  const auto differences = [&](const std::function<void(Config&, ModelDescription&)>& change) {
    Config config = some_config();
    ModelDescription model = some_model();
    change(config, model);
    return description_difference(stored, describe_store(config, model).description);
  };
  EXPECT_EQ(differences([](Config& config, ModelDescription& model) {
              config.optimizer.learning_rate = 3;
              model.workspace_bytes = 1;
            }),
            "");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) {
              model.attachments.erase(model.attachments.begin());
              model.attachments.push_back({"new", ""});
            }),
            "no new, a config.json");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) { model.attachments[0].text += " "; }),
            "another config.json");
  EXPECT_EQ(differences([](Config& config, ModelDescription&) {
              config.weights = DType::kFloat32;
              config.optimizer.kind = OptimizerKind::kLion;
              config.tile_elements = 1024;
            }),
            "bf16 weights (here: fp32), optimizer Adagrad (here: Lion), tiles of 5120 elements (here: 1024)");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) { model.blocks.pop_back(); }), "2 blocks (here: 1)");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) { model.blocks[1].name = "h.1"; }),
            "block 1 named h.0 (here: h.1)");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) {
              model.blocks[0].parameters[0].shape = {7, 5};
            }),
            "parameter 0 of block first \"block\"?: wte [5, 7] (here: wte [7, 5])");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) { model.blocks[1].parameters[0].trainable = true; }),
            "parameter 0 of block h.0: ünïcode/\\ [1, 2, 3] frozen (here: ünïcode/\\ [1, 2, 3])");
  EXPECT_EQ(differences([](Config&, ModelDescription& model) { model.blocks[0].parameters.pop_back(); }),
            "parameter 1 of block first \"block\"?: scale [] (here: none)");
}

TEST(StoreDescription, HostileTextIsRefused) {
  const std::string good = describe_store(some_config(), some_model()).description;
  ASSERT_FALSE(refused(good));
  for (const char* text : {"", "null", "[]", "{}", "{\"layout\":{}}", "{\"layout\":[],\"attachments\":[]}",
                           "{\"layout\":{},\"attachments\":{}}", "\xff\xfe"}) {
    EXPECT_TRUE(refused(text)) << text;
  }
  EXPECT_TRUE(refused(std::string(200'000, '[')));
  EXPECT_TRUE(refused(std::string(100'000, '[') + std::string(100'000, ']')));
  const std::pair<const char*, const char*> changes[] = {{"\"bf16\"", "\"bf17\""},
                                                         {"\"bf16\"", "16"},
                                                         {":5120", ":5121"},
                                                         {":5120", ":0"},
                                                         {":5120", ":-1024"},
                                                         {":5120", ":1e3"},
                                                         {"[\"wte\",true", "[true"},
                                                         {"[\"wte\",true", "[\"wte\",1"},
                                                         {"5,7]", "5,-7]"},
                                                         {"5,7]", "5,7.5]"},
                                                         {"5,7]", "5,[7]]"},
                                                         {"\"config.json\"", "\"../x\""},
                                                         {"\"config.json\"", "\"\""},
                                                         {"\"config.json\"", "\"a/b\""},
                                                         {"\"config.json\"", "7"},
                                                         {"\"config.json\"", "\"x\\u0000y\""},
                                                         {"\"empty\",", ""},
                                                         {"\"parameters\"", "\"parameter\""},
                                                         {"\"empty\"", "\"config.json\""},
                                                         {"\"attachments\"", "\"attachment\""}};
  for (const auto& [from, to] : changes) {
    std::string text = good;
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    EXPECT_TRUE(refused(text.replace(at, std::string(from).size(), to))) << from << " → " << to;
  }
}

TEST(StoreDescription, NoDamageDoesMoreThanBeRefusedOrRead) {
  std::mt19937_64 random = seeded_generator();
  const std::string good = describe_store(some_config(), some_model()).description;
  for (int i = 0; i < 3000; ++i) {
    std::string text = good;
    for (std::uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0: text[at] = static_cast<char>(random()); break;
        case 1: text.resize(at + 1); break;
        default: text.insert(at, text.substr(random() % text.size(), random() % 30));
      }
    }
    if (refused(text)) continue;
    const StoredModel stored = parse_store_description(text, "store");
    EXPECT_EQ(stored.tile_elements % 1024, 0u);
    for (const Attachment& attachment : stored.model.attachments) EXPECT_TRUE(is_plain_file_name(attachment.name));
  }
}

}  // namespace
}  // namespace spillway
