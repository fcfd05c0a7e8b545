#include "src/config/complaints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/src/config/config_text.h"

namespace spillway {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// Of the first `what` in a text.
std::string marked(const std::string& text, const std::string& what) {
  const std::size_t at = text.find(what);
  return marked_line(text, at, at + what.size());
}

TEST(MarkedLine, ShowsTheLineAndMarksThePlace) {
  EXPECT_EQ(marked("{\n  \"a\": 12,\n}", "12"),
            "    2 |   \"a\": 12,\n"
            "      |        ^^");
  EXPECT_EQ(marked("x", "x"), "    1 | x\n      | ^");
  EXPECT_EQ(marked_line("ab\n", 3, 4), "    2 | \n      | ^");  // the end of the text
  EXPECT_EQ(marked_line("", 0, 1), "    1 | \n      | ^");
}

TEST(MarkedLine, CountsCharactersNotBytes) {
  EXPECT_EQ(marked("\"größe\": ü", "ü"),
            "    1 | \"größe\": ü\n"
            "      |          ^");
}

TEST(MarkedLine, ShowsNothingThatATerminalWouldObey) {
  EXPECT_EQ(marked("\t\x1b[2J\xc2\x9b\xff x\r\n", "x"),
            "    1 |  ?[2J?? x\n"
            "      |         ^");
}

TEST(MarkedLine, CutsALongLineAroundThePlace) {
  const std::string line = std::string(500, 'a') + "!" + std::string(5'000'000, 'b');
  const std::string shown = marked(line, "!");
  EXPECT_LT(shown.size(), 300u);
  EXPECT_EQ(shown, "    1 | …" + std::string(60, 'a') + "!" + std::string(39, 'b') + "…\n      |  " +
                       std::string(60, ' ') + "^");
  // A mark ends where the line does, or the piece that is shown.
  EXPECT_THAT(marked_line("[1,\n2]", 0, 6), EndsWith("| ^^^"));
  EXPECT_THAT(marked_line(std::string(500, 'a'), 0, 500), EndsWith("| " + std::string(40, '^')));
}

TEST(Complaints, StandInTheOrderOfTheTextEachWithItsLine) {
  EXPECT_THAT(whole_refusal("{\n \"train_batch_size\": 0, \"x\": 1}"),
              AllOf(StartsWith("c.json:2:22: train_batch_size: 0 is out of range; allowed: 1 to 4294967295\n"
                               "    2 |  \"train_batch_size\": 0, \"x\": 1}\n"
                               "      |                      ^\n"
                               "c.json:2:25: unknown key \"x\"; known keys: train_batch_size, "),
                    EndsWith(", spillway\n"
                             "    2 |  \"train_batch_size\": 0, \"x\": 1}\n"
                             "      |                         ^^^")));
}

TEST(Complaints, ThoseBeforeASyntaxErrorAreMadeAsWell) {
  EXPECT_EQ(
      refusal(
          "{\"gradient_cliping\": 1, \"bf16\": {\"enable\": true}, \"optimizer\": {\"params\": {\"betas\": [0.9\n}}"),
      "c.json:1:2: unknown key \"gradient_cliping\"; closest key: gradient_clipping\n"
      "c.json:1:34: unknown key \"bf16.enable\"; closest key: enabled\n"
      "c.json:2:1: not JSON: Missing a comma or ']' after an array element; correct the text there, or just before");
}

TEST(Complaints, AKeyWithoutItsValueIsNotLookedFor) {
  EXPECT_EQ(refusal(R"({"optimizer": {"type": &Adam"}})"),
            "c.json:1:24: not JSON: Invalid value; correct the text there, or just before");
  EXPECT_EQ(refusal(R"({"optimizer": {"params": {}, "type"}})"),
            "c.json:1:36: not JSON: Missing a colon after a name of object member; correct the text there, or just "
            "before");
}

TEST(Complaints, AKeysNameCannotForgeALine) {
  const std::string said = refusal(with(R"("a\nc.json:9:9: fine\u001b[2J": 1)"));
  EXPECT_THAT(said, testing::StartsWith("c.json:1:25: unknown key \"a?c.json:9:9: fine?[2J\"; known keys"));
  EXPECT_THAT(said, testing::Not(testing::HasSubstr("\n")));
}

TEST(Complaints, WhatWouldTrainSomethingElseIsRefusedWhenItIsOn) {
  for (const std::string section : {"amp", "torch_autocast", "curriculum_learning", "data_efficiency",
                                    "progressive_layer_drop", "compression_training", "elasticity"}) {
    const auto of = [&](const std::string& value) { return with("\"" + section + "\": " + value); };
    EXPECT_THAT(refusal(of(R"({"enabled": true})")),
                HasSubstr(section + ": enabled is on, which is DeepSpeed's, and not computed here; set it to false"));
    EXPECT_THAT(refusal(of(R"({"groups": {"first": {"enabled": true}}})")), HasSubstr("groups.first.enabled is on"));
    EXPECT_THAT(refusal(of(R"({"enabled": 1})")), HasSubstr("enabled is on"));
    for (const char* off : {R"({"enabled": false})", R"({"enabled": "auto"})", "{}",
                            R"({"groups": {"enabled": false, "theta": true}})"}) {
      CapturedLog log;
      parse(of(off));
      EXPECT_THAT(log.lines, ElementsAre("c.json: known, but without effect here: " + section)) << off;
    }
  }
}

// Whoever switches them on looks for files or a report that would never be there.
TEST(Complaints, WhatWouldWriteNothingIsRefusedWhenItIsOn) {
  for (const std::string section : {"flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "nebula"}) {
    EXPECT_THAT(refusal(with("\"" + section + "\": {\"enabled\": true, \"output_path\": \"out\"}")),
                HasSubstr(section + ": enabled is on, which is DeepSpeed's, and not there; leave it out or off; "));
    CapturedLog log;
    parse(with("\"" + section + "\": {\"enabled\": false}"));
    EXPECT_THAT(log.lines, ElementsAre("c.json: known, but without effect here: " + section));
  }
}

TEST(Complaints, AKeyThatHasOneValueHereSaysWhy) {
  CapturedLog log;
  parse(R"({"train_batch_size": 1, "managed_gradient_accumulation": true, "data_types": {"buffer_dtype": null},
            "optimizer": {"type": "AdamW", "params": {"amsgrad": false}}})");
  EXPECT_THAT(log.lines, ElementsAre("c.json: known, but without effect here: managed_gradient_accumulation, "
                                     "data_types.buffer_dtype, optimizer.params.amsgrad"));
  EXPECT_THAT(refusal(with(R"("managed_gradient_accumulation": false)")),
              HasSubstr("managed_gradient_accumulation: expected true, found false; leave it out (true only: a step "));
  EXPECT_THAT(
      refusal(with(R"("data_types": {"buffer_dtype": "bf16"})")),
      HasSubstr("data_types.buffer_dtype: expected null, found the string \"bf16\"; leave it out (null only: "));
  EXPECT_THAT(refusal(with(R"("optimizer": {"params": {"amsgrad": true}})")),
              HasSubstr("optimizer.params.amsgrad: expected false, found true; leave it out (false only: "));
  EXPECT_THAT(refusal(with(R"("zero_optimization": {"ignore_unused_parameters": false})")),
              HasSubstr("ignore_unused_parameters: expected true, found false; leave it out (true only: a step may "));
  const auto warmup = [](const char* last) {
    return with(R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "last_batch_iteration": )" +
                std::string(last) + "}}");
  };
  parse(warmup("-1"));
  EXPECT_THAT(refusal(warmup("7")), HasSubstr("last_batch_iteration: expected -1, found 7; leave it out (-1 only: "));
}

TEST(Complaints, AByteOrderMarkIsNoColumn) {
  EXPECT_EQ(parse("\xef\xbb\xbf{\"train_batch_size\": 3}").micro_batch, 3u);
  EXPECT_THAT(refusal("\xef\xbb\xbf{\"x\": 3, \"train_batch_size\": 3}"),
              testing::StartsWith("c.json:1:2: unknown key"));
}

TEST(Complaints, ATypeOfWeightsThatIsNotTheOtherOneIsRefused) {
  const auto said = [](const std::string& type, const std::string& mode) {
    return refusal(with("\"data_types\": {\"param_dtype\": " + type + "}" + mode));
  };
  const std::string bf16 = R"(, "bf16": {"enabled": true})", fp16 = R"(, "fp16": {"enabled": true})";
  for (const auto& [type, mode] : {std::pair(R"("bf16")", bf16),
                                   {R"("bfloat16")", bf16},
                                   {R"("float16")", fp16},
                                   {R"("float32")", ""},
                                   {"null", bf16}})
    EXPECT_EQ(said(type, mode), "accepted") << type;
  EXPECT_THAT(said(R"("bf16")", ""), HasSubstr("data_types.param_dtype: bf16 contradicts the weights' type, fp32"));
  EXPECT_THAT(said(R"("fp32")", fp16), HasSubstr("fp32 contradicts the weights' type, fp16"));
  EXPECT_THAT(said(R"("int8")", ""), HasSubstr("is not known here"));
}

}  // namespace
}  // namespace spillway
