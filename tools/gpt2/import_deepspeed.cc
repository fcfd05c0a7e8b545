#include "tools/gpt2/import_deepspeed.h"

#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <string_view>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "spillway/import.h"
#include "tools/gpt2/model.h"
#include "tools/terminal/byte_bar.h"

namespace spillway::gpt2 {
namespace {

std::string joined(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ", ")); }

// "lr 0.0001, beta1 0.9, …", of what the checkpoint says.
std::string settings_text(const DeepSpeedGroup& group) {
  std::vector<std::string> said;
  const auto say = [&](const char* name, const std::optional<double>& value) {
    if (value) said.push_back(fmt::format("{} {}", name, *value));
  };
  say("lr", group.learning_rate);
  say("beta1", group.beta1);
  say("beta2", group.beta2);
  say("eps", group.epsilon);
  say("weight_decay", group.weight_decay);
  return joined(said);
}

std::string schedule_text(const DeepSpeedFacts& facts) {
  if (!facts.schedule_steps) return "none was saved; that of finetune's configuration begins behind the step above";
  if (*facts.schedule_steps == facts.optimizer_steps)
    return fmt::format("{} steps made; the same one in finetune's configuration goes on from there",
                       facts.optimizer_steps);
  return fmt::format("{} steps made there, but {} by Adam, which finetune's schedule goes on from",
                     *facts.schedule_steps, facts.optimizer_steps);
}

void print_text(const ImportCommand& command, const DeepSpeedFacts& facts) {
  fmt::print("{}: step {} of {}, {} parameters with {} elements\n", command.out.string(), facts.optimizer_steps,
             (command.checkpoint / facts.tag).string(), facts.parameters, facts.elements);
  fmt::print("checkpoint: {}ZeRO stage {}, {} rank{}, {} flat group{} of parameters{}\n",
             facts.version.empty() ? "" : fmt::format("DeepSpeed {}, ", facts.version), facts.stage, facts.ranks,
             facts.ranks == 1 ? "" : "s", facts.sub_groups, facts.sub_groups == 1 ? "" : "s",
             facts.swapped == 0 ? "" : fmt::format(", {} arrays from NVMe's swap files, unchecked", facts.swapped));
  fmt::print("carried: fp32 master weights, exp_avg, exp_avg_sq, and Adam's step\n");
  fmt::print("learning rate schedule: {}\n", schedule_text(facts));
  if (facts.skipped_steps > 0 || facts.global_steps != facts.optimizer_steps)
    fmt::print("not carried: the engine's own count, {} steps with {} skipped\n", facts.global_steps,
               facts.skipped_steps);
  for (const DeepSpeedGroup& group : facts.groups) {
    if (const std::string text = settings_text(group); !text.empty())
      fmt::print("not carried, finetune's configuration says it: {}\n", text);
  }
  if (facts.loss_scale) fmt::print("not carried: loss scale {}, which fp16 alone needs\n", *facts.loss_scale);
  if (facts.samples > 0)
    fmt::print("not carried: the place in the data, {} rows on; finetune begins with the first row of --data\n",
               facts.samples);
  if (!facts.client_state.empty()) fmt::print("not carried: the program's own {}\n", joined(facts.client_state));
  fmt::print("finetune --load {} goes on with step {}\n", command.out.string(), facts.optimizer_steps + 1);
}

using Writer = rapidjson::PrettyWriter<rapidjson::StringBuffer>;

void put(Writer& out, const char* key, const std::string& text) {
  out.Key(key);
  out.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}
void put(Writer& out, const char* key, std::uint64_t value) {
  out.Key(key);
  out.Uint64(value);
}
void put_if(Writer& out, const char* key, const std::optional<double>& value) {
  if (!value) return;
  out.Key(key);
  out.Double(*value);
}

void print_json(const ImportCommand& command, const DeepSpeedFacts& facts) {
  rapidjson::StringBuffer text;
  Writer out(text);
  out.SetIndent(' ', 2);
  out.StartObject();
  put(out, "snapshot", command.out.string());
  put(out, "step", facts.optimizer_steps);
  put(out, "tag", facts.tag);
  put(out, "deepspeed", facts.version);
  put(out, "stage", facts.stage);
  put(out, "ranks", facts.ranks);
  put(out, "groups", facts.sub_groups);
  put(out, "swapped", facts.swapped);
  put(out, "parameters", facts.parameters);
  put(out, "elements", facts.elements);
  if (facts.weights) put(out, "trained_in", std::string(name_of(*facts.weights)));
  put(out, "global_steps", facts.global_steps);
  put(out, "skipped_steps", facts.skipped_steps);
  put(out, "samples", facts.samples);
  if (facts.schedule_steps) put(out, "schedule_steps", *facts.schedule_steps);
  put_if(out, "loss_scale", facts.loss_scale);
  out.Key("settings");
  out.StartArray();
  for (const DeepSpeedGroup& group : facts.groups) {
    out.StartObject();
    put_if(out, "lr", group.learning_rate);
    put_if(out, "beta1", group.beta1);
    put_if(out, "beta2", group.beta2);
    put_if(out, "eps", group.epsilon);
    put_if(out, "weight_decay", group.weight_decay);
    out.EndObject();
  }
  out.EndArray();
  out.Key("client_state");
  out.StartArray();
  for (const std::string& name : facts.client_state)
    out.String(name.data(), static_cast<rapidjson::SizeType>(name.size()));
  out.EndArray();
  out.EndObject();
  fmt::print("{}\n", text.GetString());
}

}  // namespace

int import_checkpoint(const ImportCommand& command) {
  const ModelDescription model = describe_model(load_model_config(command.model), 0);
  terminal::ByteBar bar("importing");
  const DeepSpeedFacts facts = import_deepspeed(command.checkpoint, model, command.out,
                                                {.tag = command.tag,
                                                 .weights = command.type,
                                                 .verify = !command.no_verify,
                                                 .progress = [&](auto done, auto bytes) { bar.at(done, bytes); }});
  bar.clear();
  command.json ? print_json(command, facts) : print_text(command, facts);
  return 0;
}

}  // namespace spillway::gpt2
