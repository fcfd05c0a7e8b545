#include "src/description.h"

#include <rapidjson/document.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <iterator>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "src/partition.h"

namespace spillway {
namespace {

using Writer = rapidjson::Writer<rapidjson::StringBuffer>;

void write_string(Writer& out, const std::string& text) {
  out.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

// The part that the fingerprint covers.
std::string layout_json(const ModelDescription& model, DType weights, OptimizerKind optimizer,
                        std::uint64_t tile_elements) {
  rapidjson::StringBuffer buffer;
  Writer out(buffer);
  out.StartObject();
  out.Key("weights");
  write_string(out, std::string(name_of(weights)));
  out.Key("optimizer");
  write_string(out, std::string(name_of(optimizer)));
  out.Key("tile_elements");
  out.Uint64(tile_elements);
  out.Key("blocks");
  out.StartArray();
  for (const Block& block : model.blocks) {
    out.StartObject();
    out.Key("name");
    write_string(out, block.name);
    out.Key("parameters");
    out.StartArray();
    for (const Parameter& parameter : block.parameters) {
      out.StartArray();
      write_string(out, parameter.name);
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

std::uint64_t fingerprint_of(const std::string& layout) { return granule_checksum(std::as_bytes(std::span(layout))); }

[[noreturn]] void corrupt(const std::string& object) {
  throw Error(Code::kCorrupt, {object, "the model description cannot be read", 0, "start over with --fresh"});
}

// Names may hold any byte, zeros too.
std::string text_of(const rapidjson::Value& value) { return {value.GetString(), value.GetStringLength()}; }

Parameter parse_parameter(const rapidjson::Value& value, const std::string& object) {
  if (!value.IsArray() || value.Size() < 2 || !value[0].IsString() || !value[1].IsBool()) corrupt(object);
  Parameter parameter{.name = text_of(value[0]), .shape = {}, .trainable = value[1].GetBool()};
  for (rapidjson::SizeType i = 2; i < value.Size(); ++i) {
    if (!value[i].IsUint64()) corrupt(object);
    parameter.shape.push_back(value[i].GetUint64());
  }
  return parameter;
}

}  // namespace

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\0", 2)) == name.npos;
}

StoreIdentity describe_store(const Config& config, const ModelDescription& model) {
  const std::string layout = layout_json(model, config.weights, config.optimizer.kind, config.tile_elements);
  rapidjson::StringBuffer buffer;
  Writer out(buffer);
  out.StartObject();
  out.Key("layout");
  out.RawValue(layout.data(), layout.size(), rapidjson::kObjectType);
  out.Key("attachments");
  out.StartArray();
  for (const Attachment& attachment : model.attachments) {
    out.StartArray();
    write_string(out, attachment.name);
    write_string(out, attachment.text);
    out.EndArray();
  }
  out.EndArray();
  out.EndObject();
  return {.description = buffer.GetString(), .fingerprint = fingerprint_of(layout)};
}

StoredModel parse_store_description(const std::string& text, const std::string& object) {
  rapidjson::Document document;
  document.Parse<rapidjson::kParseIterativeFlag>(text.data(), text.size());
  if (document.HasParseError() || !document.IsObject() || !document.HasMember("layout") ||
      !document.HasMember("attachments")) {
    corrupt(object);
  }
  const auto& layout = document["layout"];
  if (!layout.IsObject() || !layout.HasMember("weights") || !layout["weights"].IsString() ||
      !layout.HasMember("optimizer") || !layout["optimizer"].IsString() || !layout.HasMember("tile_elements") ||
      !layout["tile_elements"].IsUint64() || !layout.HasMember("blocks") || !layout["blocks"].IsArray() ||
      !document["attachments"].IsArray()) {
    corrupt(object);
  }
  StoredModel stored;
  const std::string type = text_of(layout["weights"]);
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const auto* const known = std::ranges::find(kTypes, std::string_view(type), [](DType t) { return name_of(t); });
  if (known == std::end(kTypes)) corrupt(object);
  stored.weights = *known;
  const std::string optimizer = text_of(layout["optimizer"]);
  constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdagrad, OptimizerKind::kLion,
                                      OptimizerKind::kSgd};
  const auto* const kind =
      std::ranges::find(kKinds, std::string_view(optimizer), [](OptimizerKind k) { return name_of(k); });
  if (kind == std::end(kKinds)) corrupt(object);
  stored.optimizer = *kind;
  stored.tile_elements = layout["tile_elements"].GetUint64();
  if (stored.tile_elements == 0 || stored.tile_elements % kPartitionUnit != 0) corrupt(object);
  for (const auto& block : layout["blocks"].GetArray()) {
    if (!block.IsObject() || !block.HasMember("name") || !block["name"].IsString() || !block.HasMember("parameters") ||
        !block["parameters"].IsArray()) {
      corrupt(object);
    }
    stored.model.blocks.push_back({.name = text_of(block["name"]), .parameters = {}});
    for (const auto& parameter : block["parameters"].GetArray()) {
      stored.model.blocks.back().parameters.push_back(parse_parameter(parameter, object));
    }
  }
  for (const auto& attachment : document["attachments"].GetArray()) {
    if (!attachment.IsArray() || attachment.Size() != 2 || !attachment[0].IsString() || !attachment[1].IsString()) {
      corrupt(object);
    }
    const std::string name = text_of(attachment[0]);
    if (!is_plain_file_name(name)) corrupt(object);
    stored.model.attachments.push_back({name, text_of(attachment[1])});
  }
  stored.fingerprint =
      fingerprint_of(layout_json(stored.model, stored.weights, stored.optimizer, stored.tile_elements));
  return stored;
}

}  // namespace spillway
