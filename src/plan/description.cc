#include "src/plan/description.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <bit>
#include <set>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "src/formats/plain_file.h"
#include "src/formats/safetensors_header.h"
#include "src/plan/partition.h"
#include "src/plan/state_sections.h"

namespace spillway {
namespace {

using DescriptionWriter = rapidjson::Writer<rapidjson::StringBuffer>;

constexpr const char *kStates = "states", *kSections = "sections", *kParameter = "parameter", *kBytes = "bytes",
                     *kSumGroups = "sum_groups";
constexpr std::uint32_t kStatesFormat = 4;

// The part that the fingerprint covers.
std::string layout_json(const ModelDescription& model, DType weights, OptimizerKind optimizer,
                        std::uint64_t tile_elements) {
  rapidjson::StringBuffer buffer;
  DescriptionWriter out(buffer);
  out.StartObject();
  out.Key("weights");
  out.String(std::string(name_of(weights)));
  out.Key("optimizer");
  out.String(std::string(name_of(optimizer)));
  out.Key("tile_elements");
  out.Uint64(tile_elements);
  out.Key("blocks");
  out.StartArray();
  for (const Block& block : model.blocks) {
    out.StartObject();
    out.Key("name");
    out.String(block.name);
    out.Key("parameters");
    out.StartArray();
    for (const Parameter& parameter : block.parameters) {
      out.StartArray();
      out.String(parameter.name);
      if (parameter.bytes)
        out.String(kBytes);  // which versions that do not know it refuse
      else
        out.Bool(parameter.trainable);
      for (std::uint64_t dimension : parameter.shape) out.Uint64(dimension);
      out.EndArray();
    }
    out.EndArray();
    out.EndObject();
  }
  out.EndArray();
  out.EndObject();
  return buffer.GetString();
}

// The arrays that states consist of, in their order.
template <typename Arrays>
void write_states(DescriptionWriter& out, const Arrays& arrays) {
  const auto put = [&out](const char* key, std::string_view text) {
    out.Key(key);
    out.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
  };
  out.Key(kStates);
  out.StartArray();
  for (const StateArray& array : arrays) {
    out.StartObject();
    put("name", array.name);
    put("type", array.type);
    out.Key("bytes");
    out.Uint64(array.bytes);
    out.Key("group");
    out.Uint64(array.group);
    put("scale", array.scale);
    out.EndObject();
  }
  out.EndArray();
}

// Of every parameter whose states are others than those of most. Empty: there is none, as in all older stores.
std::string sections_json(const Config& config, const ModelDescription& model) {
  rapidjson::StringBuffer buffer;
  DescriptionWriter out(buffer);
  bool any = false;
  out.StartArray();
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const StateList states = parameter.trainable ? states_of(config, parameter) : StateList{};
      if (states.empty()) continue;
      any = true;
      out.StartObject();
      out.Key(kParameter);
      out.String(parameter.name);
      write_states(out, states);
      out.EndObject();
    }
  }
  out.EndArray();
  return any ? buffer.GetString() : "";
}

// How a step's micro-batches are summed is part of a store's identity; in one part it says nothing, as all older
// stores.
std::string sums_text(std::uint32_t sum_groups) {
  return sum_groups > 1 ? fmt::format("{}:{}", kSumGroups, sum_groups) : "";
}

// Before format 4 a description does not list them.
std::string description_as_of(const std::string& description, std::uint32_t format) {
  if (format >= kStatesFormat) return description;
  rapidjson::Document document;
  document.Parse<rapidjson::kParseIterativeFlag>(description.data(), description.size());
  document.RemoveMember(kStates);
  rapidjson::StringBuffer buffer;
  DescriptionWriter out(buffer);
  document.Accept(out);
  return buffer.GetString();
}

std::uint64_t fingerprint_of(const std::string& layout) { return granule_checksum(std::as_bytes(std::span(layout))); }

[[noreturn]] void corrupt(const std::string& object) {
  throw Error(Code::kCorrupt, object, "the model description cannot be read", 0, Remedy::kReplace);
}

// Names may hold any byte, zeros too.
std::string text_of(const rapidjson::Value& value) { return {value.GetString(), value.GetStringLength()}; }

using Is = bool (rapidjson::Value::*)() const;
constexpr Is kIsText = &rapidjson::Value::IsString, kIsNumber = &rapidjson::Value::IsUint64;
constexpr Is kIsList = &rapidjson::Value::IsArray, kIsObject = &rapidjson::Value::IsObject;

const rapidjson::Value& member(const rapidjson::Value& of, const char* key, Is kind, const std::string& object) {
  if (!of.IsObject() || !of.HasMember(key) || !(of[key].*kind)()) corrupt(object);
  return of[key];
}

// Of the values, the one whose name it is.
template <typename Values>
typename Values::value_type named(const rapidjson::Value& text, const Values& values, const std::string& object) {
  const auto found = std::ranges::find(values, text_of(text), [](auto value) { return name_of(value); });
  if (found == values.end()) corrupt(object);
  return *found;
}

const Attachment* find_attachment(const ModelDescription& model, std::string_view name) {
  const auto found = std::ranges::find(model.attachments, name, &Attachment::name);
  return found == model.attachments.end() ? nullptr : &*found;
}

Parameter parse_parameter(const rapidjson::Value& value, const std::string& object) {
  if (!value.IsArray() || value.Size() < 2 || !value[0].IsString()) corrupt(object);
  Parameter parameter{.name = text_of(value[0]), .shape = {}};
  parameter.bytes = value[1].IsString() && text_of(value[1]) == kBytes;
  if (!parameter.bytes && !value[1].IsBool()) corrupt(object);
  parameter.trainable = !parameter.bytes && value[1].GetBool();
  for (rapidjson::SizeType i = 2; i < value.Size(); ++i) {
    if (!value[i].IsUint64()) corrupt(object);
    parameter.shape.push_back(value[i].GetUint64());
  }
  return parameter;
}

// Refuses arrays that are not those which this version keeps for such a model: their bytes would be misread.
void check_states(const rapidjson::Value& states, const StoredModel& stored, const std::string& object) {
  if (!states.IsArray()) corrupt(object);
  const StateArrays known = state_arrays({.type = stored.weights, .optimizer = stored.optimizer});
  const auto refuse = [&](const std::string& what) {
    throw Error(Code::kUnsupported, {object, what, 0, "use the version that made the store"});
  };
  for (rapidjson::SizeType i = 0; i < states.Size(); ++i) {
    const auto text = [&](const char* key) { return text_of(member(states[i], key, kIsText, object)); };
    const auto number = [&](const char* key) { return member(states[i], key, kIsNumber, object).GetUint64(); };
    const StateArray wanted = i < known.count ? known.array[i] : StateArray{};
    const std::string name = text("name"), type = text("type"), scale = text("scale");
    const std::uint64_t bytes = number("bytes"), group = number("group");
    if (name == wanted.name && type == wanted.type && scale == wanted.scale && bytes == wanted.bytes &&
        group == wanted.group) {
      continue;
    }
    refuse(
        fmt::format("keeps the state array {} ({}, groups of {} with a scale of type {}), which this version does "
                    "not know",
                    printable(name), printable(type), group, printable(scale)));
  }
  if (states.Size() < known.count) refuse(fmt::format("keeps no state array {}", known.array[states.Size()].name));
}

// Parameters that no section is of, where their shape does not say that already.
std::vector<std::string> exact_of(const rapidjson::Document& document, const ModelDescription& model) {
  std::set<std::string> listed;
  if (document.HasMember(kSections) && document[kSections].IsArray()) {
    for (const auto& section : document[kSections].GetArray()) {
      const bool named = section.IsObject() && section.HasMember(kParameter) && section[kParameter].IsString();
      if (named) listed.insert(text_of(section[kParameter]));
    }
  }
  std::vector<std::string> exact;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const bool by_itself = !parameter.trainable || parameter.shape.size() < 2;
      if (!by_itself && !listed.contains(parameter.name)) exact.push_back(parameter.name);
    }
  }
  return exact;
}

std::uint32_t parse_sum_groups(const rapidjson::Document& document, const std::string& object) {
  if (!document.HasMember(kSumGroups)) return 1;
  const std::uint64_t groups = member(document, kSumGroups, kIsNumber, object).GetUint64();
  if (groups < 2 || groups > kMostSumGroups || !std::has_single_bit(groups)) corrupt(object);
  return static_cast<std::uint32_t>(groups);
}

// Says which form the states have; refuses what no form of this version's gives for such a model.
std::string check_sections(const rapidjson::Document& document, StoredModel& stored, const std::string& object) {
  const bool given = document.HasMember(kSections);
  stored.exact_states = exact_of(document, stored.model);
  for (const MomentFormat form : kMomentFormats) {
    stored.moments = form;
    const std::string known = sections_json(config_of(stored), stored.model);
    rapidjson::Document wanted;
    wanted.Parse(known.data(), known.size());
    if (given ? !known.empty() && document[kSections] == wanted : known.empty()) return known;
  }
  throw Error(Code::kUnsupported, {object, "keeps states of some parameters that this version does not know", 0,
                                   "use the version that made the store"});
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

std::string text_of(const Parameter& parameter) {
  std::vector<std::string> shape;
  for (std::uint64_t dimension : parameter.shape) shape.push_back(std::to_string(dimension));
  return fmt::format("{} [{}]{}", printable(parameter.name), joined(shape),
                     parameter.bytes       ? " bytes"
                     : parameter.trainable ? ""
                                           : " frozen");
}

// The first block or parameter in which two models differ, as far as both go; empty: none.
std::string first_difference(const ModelDescription& there, const ModelDescription& here) {
  for (std::size_t b = 0; b < std::min(there.blocks.size(), here.blocks.size()); ++b) {
    const Block &stored = there.blocks[b], &wanted = here.blocks[b];
    if (stored.name != wanted.name) {
      return fmt::format("block {} named {} (here: {})", b, printable(stored.name), printable(wanted.name));
    }
    for (std::size_t p = 0; p < std::max(stored.parameters.size(), wanted.parameters.size()); ++p) {
      const auto text = [p](const Block& block) {
        return p < block.parameters.size() ? text_of(block.parameters[p]) : "none";
      };
      if (text(stored) == text(wanted)) continue;
      return fmt::format("parameter {} of block {}: {} (here: {})", p, printable(stored.name), text(stored),
                         text(wanted));
    }
  }
  return "";
}

// The form, or else the first parameter, in which the states of two models of the same blocks differ; empty: none.
std::string state_difference(const StoredModel& there, const StoredModel& here) {
  if (there.moments != here.moments)
    return fmt::format("{} states (here: {})", name_of(there.moments), name_of(here.moments));
  const Config stored = config_of(there), wanted = config_of(here);
  for (std::size_t b = 0; b < std::min(there.model.blocks.size(), here.model.blocks.size()); ++b) {
    for (const Parameter& parameter : there.model.blocks[b].parameters) {
      const MomentFormat one = format_of(stored, parameter), other = format_of(wanted, parameter);
      if (one == other || !parameter.trainable) continue;
      return fmt::format("{} states of {} (here: {})", name_of(one), printable(parameter.name), name_of(other));
    }
  }
  return "";
}

}  // namespace

Config config_of(const StoredModel& stored) {
  Config config;
  config.weights = stored.weights;
  config.optimizer.kind = stored.optimizer;
  config.tile_elements = stored.tile_elements;
  config.moments = stored.moments;
  config.exact_states = stored.exact_states;
  config.sum_groups = config.gradient_accumulation = stored.sum_groups;
  return config;
}

StoreIdentity describe_store(const Config& config, const ModelDescription& model) {
  const std::string layout = layout_json(model, config.weights, config.optimizer.kind, config.tile_elements);
  rapidjson::StringBuffer buffer;
  DescriptionWriter out(buffer);
  out.StartObject();
  out.Key("layout");
  out.RawValue(layout.data(), layout.size(), rapidjson::kObjectType);
  out.Key("attachments");
  out.StartArray();
  for (const Attachment& attachment : model.attachments) {
    out.StartArray();
    out.String(attachment.name);
    out.String(attachment.text);
    out.EndArray();
  }
  out.EndArray();
  write_states(out, state_arrays({.type = config.weights, .optimizer = config.optimizer.kind}));
  const std::string sections = sections_json(config, model);
  if (!sections.empty()) {
    out.Key(kSections);
    out.RawValue(sections.data(), sections.size(), rapidjson::kArrayType);
  }
  if (config.sum_groups > 1) {
    out.Key(kSumGroups);
    out.Uint64(config.sum_groups);
  }
  out.EndObject();
  return {.description = buffer.GetString(),
          .fingerprint = fingerprint_of(layout + sections + sums_text(config.sum_groups)),
          .difference = &description_difference,
          .remedy = &difference_remedy,
          .as_of_format = &description_as_of};
}

std::uint64_t layout_fingerprint(const ModelDescription& model, DType weights, OptimizerKind optimizer,
                                 std::uint64_t tile_elements) {
  return fingerprint_of(layout_json(model, weights, optimizer, tile_elements));
}

std::string description_difference(const std::string& stored, const std::string& wanted) {
  const StoredModel there = parse_store_description(stored, "store"), here = parse_store_description(wanted, "run");
  std::vector<std::string> found;
  const auto compare = [&found](const std::string& stored_text, const std::string& wanted_text, const auto& value) {
    if (stored_text != wanted_text) found.push_back(fmt::format("{} (here: {})", stored_text, value));
  };
  const auto weights = [](const StoredModel& model) { return fmt::format("{} weights", name_of(model.weights)); };
  const auto optimizer = [](const StoredModel& model) { return fmt::format("optimizer {}", name_of(model.optimizer)); };
  const auto tiles = [](const StoredModel& model) { return fmt::format("tiles of {} elements", model.tile_elements); };
  const auto sums = [](const StoredModel& model) { return fmt::format("sum_groups {}", model.sum_groups); };
  const auto blocks = [](const StoredModel& model) { return fmt::format("{} blocks", model.model.blocks.size()); };
  compare(weights(there), weights(here), name_of(here.weights));
  compare(optimizer(there), optimizer(here), name_of(here.optimizer));
  compare(tiles(there), tiles(here), here.tile_elements);
  compare(sums(there), sums(here), here.sum_groups);
  compare(blocks(there), blocks(here), here.model.blocks.size());
  if (found.empty()) {
    const std::string states = state_difference(there, here);
    if (!states.empty()) found.push_back(states);
  }
  const std::string parameter = first_difference(there.model, here.model);
  if (!parameter.empty()) found.push_back(parameter);
  if (!found.empty()) return joined(found);
  const auto compare_attachments = [&](const ModelDescription& of, const ModelDescription& with, const char* without) {
    for (const Attachment& attachment : of.attachments) {
      const Attachment* const same = find_attachment(with, attachment.name);
      if (!same) {
        found.push_back(without + attachment.name);
      } else if (&of == &here.model && same->text != attachment.text) {
        found.push_back("another " + attachment.name);
      }
    }
  };
  compare_attachments(here.model, there.model, "no ");
  compare_attachments(there.model, here.model, "a ");
  return joined(found);
}

Remedy difference_remedy(const std::string& stored, const std::string& wanted) {
  const StoredModel there = parse_store_description(stored, "store"), here = parse_store_description(wanted, "run");
  if (state_difference(there, here).empty()) return Remedy::kItsSettingsOrReplace;
  const auto layout = [](const StoredModel& of) {
    return layout_json(of.model, of.weights, of.optimizer, of.tile_elements);
  };
  return layout(there) == layout(here) ? Remedy::kItsStatesOrSnapshot : Remedy::kItsSettingsOrReplace;
}

StoredModel parse_store_description(const std::string& text, const std::string& object) {
  rapidjson::Document document;
  document.Parse<rapidjson::kParseIterativeFlag>(text.data(), text.size());
  if (document.HasParseError()) corrupt(object);
  const rapidjson::Value& layout = member(document, "layout", kIsObject, object);
  const rapidjson::Value& blocks = member(layout, "blocks", kIsList, object);
  const rapidjson::Value& attachments = member(document, "attachments", kIsList, object);
  StoredModel stored;
  stored.weights = named(member(layout, "weights", kIsText, object), kDTypes, object);
  stored.optimizer = named(member(layout, "optimizer", kIsText, object), kOptimizerKinds, object);
  stored.tile_elements = member(layout, "tile_elements", kIsNumber, object).GetUint64();
  if (document.HasMember(kStates)) check_states(document[kStates], stored, object);
  if (stored.tile_elements == 0 || stored.tile_elements % kPartitionUnit != 0) corrupt(object);
  for (const auto& block : blocks.GetArray()) {
    stored.model.blocks.push_back({.name = text_of(member(block, "name", kIsText, object)), .parameters = {}});
    for (const auto& parameter : member(block, "parameters", kIsList, object).GetArray()) {
      stored.model.blocks.back().parameters.push_back(parse_parameter(parameter, object));
    }
  }
  for (const auto& attachment : attachments.GetArray()) {
    if (!attachment.IsArray() || attachment.Size() != 2 || !attachment[0].IsString() || !attachment[1].IsString()) {
      corrupt(object);
    }
    const std::string name = text_of(attachment[0]);
    if (!is_plain_file_name(name) || find_attachment(stored.model, name)) corrupt(object);
    stored.model.attachments.push_back({name, text_of(attachment[1])});
  }
  const std::string sections = check_sections(document, stored, object);
  stored.sum_groups = parse_sum_groups(document, object);
  for (Block& block : stored.model.blocks) {
    for (Parameter& parameter : block.parameters) parameter.pushes = stored.sum_groups;
  }
  stored.fingerprint =
      fingerprint_of(layout_json(stored.model, stored.weights, stored.optimizer, stored.tile_elements) + sections +
                     sums_text(stored.sum_groups));
  return stored;
}

}  // namespace spillway
