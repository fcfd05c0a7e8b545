#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>

#include "spillway/import.h"
#include "src/config/complaints.h"

namespace spillway {
namespace {

using FactsWriter = rapidjson::PrettyWriter<rapidjson::StringBuffer>;

void put(FactsWriter& out, const char* key, const std::string& text) {
  out.Key(key);
  out.String(shown_text(text));  // a path may have any bytes, JSON has UTF-8
}

void put(FactsWriter& out, const char* key, std::uint64_t value) {
  out.Key(key);
  out.Uint64(value);
}

void put_if(FactsWriter& out, const char* key, const std::optional<double>& value) {
  if (!value || !std::isfinite(*value)) return;  // JSON has no word for those
  out.Key(key);
  out.Double(*value);
}

}  // namespace

std::string info_json(const DeepSpeedInfo& facts, const std::filesystem::path& snapshot) {
  rapidjson::StringBuffer text;
  FactsWriter out(text);
  out.SetIndent(' ', 2);
  out.StartObject();
  put(out, "snapshot", snapshot.string());
  put(out, "step", facts.step);
  put(out, "dtype", std::string(name_of(facts.snapshot_weights)));
  put(out, "tag", facts.tag);
  put(out, "deepspeed", facts.version);
  put(out, "stage", facts.stage);
  put(out, "ranks", facts.ranks);
  put(out, "groups", facts.sub_groups);
  put(out, "swapped", facts.swapped);
  put(out, "parameters", facts.parameters);
  put(out, "elements", facts.elements);
  if (facts.frozen_given > 0) put(out, "frozen_given", facts.frozen_given);
  if (facts.weights) put(out, "trained_in", std::string(name_of(*facts.weights)));
  put(out, "optimizer_steps", facts.optimizer_steps);
  put(out, "global_steps", facts.global_steps);
  put(out, "skipped_steps", facts.skipped_steps);
  put(out, "samples", facts.samples);
  if (facts.schedule_steps) put(out, "schedule_steps", *facts.schedule_steps);
  if (facts.loss_scale) put_if(out, "loss_scale", facts.loss_scale->scale);
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
  for (const std::string& name : facts.client_state) out.String(name);
  out.EndArray();
  out.EndObject();
  return text.GetString();
}

}  // namespace spillway
