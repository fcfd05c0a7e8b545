#include "src/checkpoint/snapshot_record.h"

#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "src/formats/json_tree.h"
#include "src/formats/new_directory.h"
#include "src/plan/description.h"
#include "src/plan/layout.h"
#include "src/plan/partition.h"
#include "swap/manifest.h"

namespace spillway {
namespace {

// Each what a reader of those before it would not see: that some were updated less often, that frozen weights are not
// there.
constexpr std::uint64_t kSnapshotFormat = 2, kWithUpdateCounts = 3, kWithoutFrozen = 4;
constexpr std::uint64_t kMostBytes = 256 * kMiB;
constexpr std::string_view kChecksumLine = "  \"checksum\": \"";
constexpr std::size_t kChecksumTail = kChecksumLine.size() + 16 + 4;  // the line, its quote, and `}`

using JsonText = rapidjson::StringBuffer;
using Writer = rapidjson::PrettyWriter<JsonText>;

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

std::string checksum_of(std::string_view text) { return hex(attachment_checksum(text)); }

void put_checksums(Writer& out, const char* key, const std::map<std::string, std::uint64_t>& checksums) {
  out.Key(key);
  out.StartObject();
  for (const auto& [name, checksum] : checksums) {
    out.String(name);
    out.String(hex(checksum));
  }
  out.EndObject();
}

[[noreturn]] void corrupt(const std::string& object) {
  throw Error(Code::kCorrupt, {object, "is not as it was written", 0, "take another snapshot"});
}

// The members of a text whose checksum is right: whatever else is wrong with it, it is not an accident.
class Members {
 public:
  Members(const JsonValue& value, const std::string& object) : value_(value), object_(object) {}

  const JsonValue& at(std::string_view name, JsonValue::Kind kind) const {
    const JsonValue* member = value_.member(name);
    if (!member || member->kind != kind) corrupt(object_);
    return *member;
  }
  const std::string& text(std::string_view name) const { return at(name, JsonValue::Kind::kString).text; }
  std::uint64_t integer(std::string_view name) const {
    const JsonValue& member = at(name, JsonValue::Kind::kNumber);
    if (!member.integer) corrupt(object_);
    return *member.integer;
  }
  template <typename Values>
  typename Values::value_type one_of(std::string_view name, const Values& values) const {
    const auto found = std::ranges::find(values, text(name), [](auto value) { return name_of(value); });
    if (found == values.end()) corrupt(object_);
    return *found;
  }

 private:
  const JsonValue& value_;
  const std::string& object_;
};

std::uint64_t parse_hex(std::string_view text, const std::string& object) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size()) corrupt(object);
  return value;
}

std::map<std::string, std::uint64_t> parse_checksums(const JsonValue& members, const std::string& object) {
  std::map<std::string, std::uint64_t> checksums;
  for (std::size_t m = 0; m < members.items.size(); ++m)
    checksums.emplace(members.keys[m].name, parse_hex(members.items[m].text, object));
  return checksums;
}

std::vector<std::byte> parse_blob(std::string_view text, const std::string& object) {
  if (text.size() % 2 != 0 || text.size() / 2 > kBlobCapacity) corrupt(object);
  std::vector<std::byte> blob;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    blob.push_back(static_cast<std::byte>(parse_hex(text.substr(i, 2), object)));
  }
  return blob;
}

}  // namespace

SnapshotArrayNames names_of(SnapshotArray array) {
  switch (array) {
    case SnapshotArray::kWeights: return {"model", ""};
    case SnapshotArray::kExpAvg: return {"exp_avg", ".exp_avg"};
    case SnapshotArray::kExpAvgSq: return {"exp_avg_sq", ".exp_avg_sq"};
  }
  return {};
}

std::vector<SnapshotArray> snapshot_arrays(OptimizerKind optimizer, const ModelDescription& model) {
  std::vector<SnapshotArray> arrays = {SnapshotArray::kWeights};
  const bool trained = std::ranges::any_of(
      model.blocks, [](const Block& block) { return std::ranges::any_of(block.parameters, &Parameter::trainable); });
  if (!trained) return arrays;
  if (has_exp_avg(optimizer)) arrays.push_back(SnapshotArray::kExpAvg);
  if (has_exp_avg_sq(optimizer)) arrays.push_back(SnapshotArray::kExpAvgSq);
  return arrays;
}

std::uint64_t attachment_checksum(std::string_view text) { return granule_checksum(std::as_bytes(std::span(text))); }

std::uint64_t snapshot_fingerprint(const Config& config, const ModelDescription& model) {
  return layout_fingerprint(model, config.weights, config.optimizer.kind, kPartitionUnit);
}

std::string snapshot_text(const SnapshotRecord& record) {
  JsonText text;
  Writer out(text);
  out.SetIndent(' ', 2);
  out.StartObject();
  out.Key("format");
  out.Uint64(record.frozen_left_out         ? kWithoutFrozen
             : record.update_counts.empty() ? kSnapshotFormat
                                            : kWithUpdateCounts);
  out.Key("step");
  out.Uint64(record.facts.step);
  out.Key("weights");
  out.String(std::string(name_of(record.facts.weights)));
  out.Key("optimizer");
  out.String(std::string(name_of(record.facts.optimizer)));
  if (record.facts.moments != MomentFormat::kFloat32) {  // who does not know it restores exact values
    out.Key("states");
    out.String(std::string(name_of(record.facts.moments)));
  }
  out.Key("model");
  out.String(hex(record.facts.model));
  out.Key("blob");
  std::string blob;
  for (const std::byte byte : record.blob) blob += fmt::format("{:02x}", static_cast<unsigned>(byte));
  out.String(blob);
  out.Key("files");
  out.StartArray();
  for (const std::string& file : record.files) out.String(file);
  out.EndArray();
  put_checksums(out, "attachments", record.attachments);
  put_checksums(out, "tensors", record.checksums);
  if (!record.update_counts.empty()) {
    out.Key("update_counts");
    out.StartObject();
    for (const auto& [name, count] : record.update_counts) {
      out.String(name);
      out.Uint64(count);
    }
    out.EndObject();
  }
  out.EndObject();
  std::string body(text.GetString(), text.GetSize());
  body.resize(body.size() - 2);  // `}` and the line end before it
  body += ",\n";
  return body + std::string(kChecksumLine) + checksum_of(body) + "\"\n}\n";
}

SnapshotRecord parse_snapshot(const std::string& text, const std::string& object) {
  if (text.size() < kChecksumTail) corrupt(object);
  const std::string_view body = std::string_view(text).substr(0, text.size() - kChecksumTail);
  if (text.substr(body.size()) != std::string(kChecksumLine) + checksum_of(body) + "\"\n}\n") corrupt(object);
  JsonValue root;
  if (parse_json(text, {.depth = 8, .values = 4'000'000}, root)) corrupt(object);
  const Members members(root, object);
  const std::uint64_t format = members.integer("format");
  if (format < kSnapshotFormat || format > kWithoutFrozen) {
    throw Error(Code::kUnsupported,
                {object, fmt::format("has format {}", format), 0,
                 fmt::format("this version of Spillway reads formats {} to {}", kSnapshotFormat, kWithoutFrozen)});
  }
  SnapshotRecord record;
  record.frozen_left_out = format == kWithoutFrozen;
  record.facts.step = members.integer("step");
  record.facts.weights = members.one_of("weights", kDTypes);
  record.facts.optimizer = members.one_of("optimizer", kOptimizerKinds);
  if (root.member("states")) record.facts.moments = members.one_of("states", kMomentFormats);
  record.facts.model = parse_hex(members.text("model"), object);
  record.blob = parse_blob(members.text("blob"), object);
  for (const JsonValue& file : members.at("files", JsonValue::Kind::kArray).items) record.files.push_back(file.text);
  record.checksums = parse_checksums(members.at("tensors", JsonValue::Kind::kObject), object);
  if (root.member("attachments"))
    record.attachments = parse_checksums(members.at("attachments", JsonValue::Kind::kObject), object);
  for (const auto& [file, checksum] : record.attachments) {
    if (!is_plain_file_name(file)) corrupt(object);
  }
  if (format == kSnapshotFormat || (record.frozen_left_out && !root.member("update_counts"))) return record;
  const JsonValue& counts = members.at("update_counts", JsonValue::Kind::kObject);
  for (std::size_t c = 0; c < counts.items.size(); ++c) {
    if (!counts.items[c].integer || *counts.items[c].integer > record.facts.step) corrupt(object);
    record.update_counts.emplace(counts.keys[c].name, *counts.items[c].integer);
  }
  return record;
}

SnapshotRecord read_snapshot(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kSnapshotFile;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw Error(Code::kNotFound, {directory.string(), fmt::format("is no snapshot: it has no {}", kSnapshotFile), 0,
                                  "name a directory that a run has saved"});
  }
  return parse_snapshot(read_text(path, kMostBytes), path.string());
}

SnapshotRecord read_snapshot(const std::filesystem::path& directory,
                             const std::function<void(const SnapshotRecord& record)>& open) {
  while (true) {
    SnapshotRecord record = read_snapshot(directory);
    const auto replaced = [&] {
      const SnapshotRecord now = read_snapshot(directory);
      return now.checksums != record.checksums || now.attachments != record.attachments;
    };
    try {
      open(record);
    } catch (const Error&) {  // perhaps of another snapshot's files
      if (!replaced()) throw;
      continue;
    }
    if (!replaced()) return record;
  }
}

std::optional<SnapshotInfo> find_snapshot(const std::filesystem::path& directory, std::string* why) {
  const auto no = [why](const std::filesystem::path& object, std::string_view happened) {
    if (why) *why = fmt::format("{}: {}", object.string(), happened);
    return std::nullopt;
  };
  try {
    const SnapshotRecord record = read_snapshot(directory);
    const std::vector<std::string> there = names_in(directory);
    for (const std::string& file : record.files) {
      if (!std::ranges::binary_search(there, file)) return no(directory / file, "is missing");
    }
    check_attachments(record, directory);
    return record.facts;
  } catch (const Error& error) {
    return no(error.parts().object, error.parts().happened);
  }
}

std::string read_attachment(const SnapshotRecord& record, const std::filesystem::path& directory,
                            const std::string& name, Links links) {
  std::string text = read_text(directory / name, kMostAttachmentBytes, links);
  const auto expected = record.attachments.find(name);
  if (expected == record.attachments.end() || expected->second == attachment_checksum(text)) return text;
  throw Error(Code::kCorrupt, {(directory / name).string(), "does not match its checksum in the snapshot", 0,
                               "put back the file that was saved, or use another snapshot; check the drive"});
}

void check_attachments(const SnapshotRecord& record, const std::filesystem::path& directory) {
  for (const auto& [name, checksum] : record.attachments) read_attachment(record, directory, name);
}

void refuse_other_files(const std::filesystem::path& directory) {
  const SnapshotRecord record = read_snapshot(directory);
  for (const std::string& name : names_in(directory)) {
    if (name == kSnapshotFile || std::ranges::find(record.files, name) != record.files.end()) continue;
    throw Error(Code::kInvalidArgument, {(directory / name).string(), "was not saved with the snapshot around it", 0,
                                         "take it elsewhere, or remove the directory by hand"});
  }
}

void remove_snapshot(const std::filesystem::path& directory) {
  refuse_other_files(directory);
  remove_directory(directory);
}

}  // namespace spillway
