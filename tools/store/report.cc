#include "tools/store/report.h"

#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>
#include <system_error>

#include "spillway/units.h"

namespace spillway::store {
namespace {

using Json = rapidjson::PrettyWriter<rapidjson::StringBuffer>;

std::string size_text(std::uint64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / static_cast<double>(kMiB));
}

std::string plural(std::uint64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string_view name_of(RecordState state) {
  return state == RecordState::kEmpty ? "empty" : state == RecordState::kValid ? "whole" : "damaged";
}

std::string copy_text(const RecordCopy& copy) {
  if (copy.state != RecordState::kValid) return std::string(name_of(copy.state));
  return fmt::format("commit {} of step {}", copy.sequence, copy.step);
}

// The record whose copy is the newest valid one; nothing without any.
std::optional<std::size_t> winner(const StoreRecords& records) {
  std::optional<std::size_t> best;
  std::uint64_t newest = 0;
  for (std::size_t record = 0; record < records.size(); ++record) {
    for (const RecordCopy& copy : records[record]) {
      if (copy.state != RecordState::kValid || (best && copy.sequence <= newest)) continue;
      best = record;
      newest = copy.sequence;
    }
  }
  return best;
}

std::string blob_text(const std::vector<std::byte>& blob) {
  constexpr std::size_t kLongest = 80;
  const std::string text(reinterpret_cast<const char*>(blob.data()), blob.size());
  const bool plain = std::ranges::all_of(text, [](unsigned char c) { return std::isprint(c) != 0; });
  return plain && text.size() <= kLongest ? "\"" + text + "\"" : plural(text.size(), "byte");
}

void string(Json& json, const char* key, std::string_view text) {
  json.Key(key);
  json.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

void number(Json& json, const char* key, std::uint64_t value) {
  json.Key(key);
  json.Uint64(value);
}

void number(Json& json, const char* key, const std::optional<std::uint64_t>& value) {
  if (value) return number(json, key, *value);
  json.Key(key);
  json.Null();
}

void write_bad(Json& json, const BadExtent& bad) {
  json.StartObject();
  string(json, "name", bad.name);
  string(json, "file", bad.file.native());
  number(json, "offset", bad.offset);
  number(json, "bytes", bad.bytes);
  json.Key("errno");
  json.Int(bad.error);
  json.EndObject();
}

void write_records(Json& json, const StoreRecords& records) {
  json.Key("records");
  json.StartArray();
  for (const auto& record : records) {
    json.StartArray();
    for (const RecordCopy& copy : record) {
      json.StartObject();
      string(json, "state", name_of(copy.state));
      if (copy.state == RecordState::kValid) {
        number(json, "commit", copy.sequence);
        number(json, "step", copy.step);
      }
      json.EndObject();
    }
    json.EndArray();
  }
  json.EndArray();
}

}  // namespace

std::vector<std::string> damage_of(const StoreInfo& store) {
  std::vector<std::string> damage;
  if (store.in_use || store.slots < 2) return damage;
  if (!store.step) {
    damage.emplace_back("no committed step: its run was cut short before the first commit, or all records are damaged");
  } else if (store.newest_lost) {
    damage.push_back(fmt::format(
        "the newest record and its copy are damaged: the next run goes back to step {} if all of it is intact",
        *store.step));
  }
  return damage;
}

std::string store_text(const StoreInfo& store) {
  std::string text;
  auto out = std::back_inserter(text);
  const auto line = [&](const char* what, const std::string& said) { fmt::format_to(out, "{:<9} {}\n", what, said); };
  line("model",
       fmt::format("{} of {} parameters, {} of them trained; fingerprint {:016x}",
                   plural(store.model.blocks.size(), "block"), store.parameters, store.trainable, store.fingerprint));
  for (const Attachment& attachment : store.model.attachments) {
    line("", fmt::format("with {}, {}", attachment.name, plural(attachment.text.size(), "byte")));
  }
  line("types", fmt::format("{} weights, optimizer {}; store format {}", spillway::name_of(store.weights),
                            spillway::name_of(store.optimizer), store.format));
  line("tiles", fmt::format("{} of at most {} elements, {} each, whatever tier they live in during a run", store.tiles,
                            store.tile_elements, plural(store.slots, "slot")));
  line("sizes", fmt::format("weights {}, states {} in one slot of all tiles; scratch {}", size_text(store.weight_bytes),
                            size_text(store.state_bytes), size_text(store.scratch_bytes)));
  for (const StoreFileInfo& file : store.files) {
    std::uint64_t shares = 0;
    for (const StoreFileInfo& other : store.files) shares += other.share;
    line("file", fmt::format("{}, {}, {} of {} parts", file.path.string(), size_text(file.bytes), file.share, shares));
  }
  const auto wins = winner(store.records);
  for (std::size_t record = 0; record < store.records.size(); ++record) {
    const auto& [first, copy] = store.records[record];
    line(record == 0 ? "record A" : "record B", fmt::format("{}; its copy: {}{}", copy_text(first), copy_text(copy),
                                                            wins == record ? "   <- the newest" : ""));
  }
  line("step", store.slots < 2 ? "none is kept: made with commit_every 0"
               : store.step    ? fmt::format("{}, with {} of the caller's own", *store.step, blob_text(store.blob))
                               : "none");
  if (store.loss_scale) {
    line("scale", fmt::format("{} is the loss scale of the next step; {} skipped so far", *store.loss_scale,
                              plural(store.skipped_steps, "step")));
  }
  line("lock", store.in_use ? "held by a running process, which may be writing a record just now" : "free");
  for (const std::string& damage : damage_of(store)) line("DAMAGED", damage);
  return text;
}

std::string bad_text(const BadExtent& bad) {
  const char* what = bad.error == 0 ? "do not match their checksum" : "cannot be read";
  const std::string errno_text = bad.error == 0 ? "" : fmt::format(" ({})", std::generic_category().message(bad.error));
  return fmt::format("{}: {} at offset {} ({} bytes) {}{}", bad.file.string(), bad.name, bad.offset, bad.bytes, what,
                     errno_text);
}

std::string verified_text(const Verified& verified) {
  const CheckedStore& checked = verified.checked;
  const double rate = verified.seconds > 0 ? static_cast<double>(checked.bytes) / verified.seconds / 1e9 : 0;
  const std::string read =
      fmt::format("{} read in {:.1f} s, {:.2f} GB/s", size_text(checked.bytes), verified.seconds, rate);
  if (checked.bad_extents == 0) return fmt::format("verified  step {}: every byte is intact; {}", checked.step, read);
  return fmt::format("DAMAGED   step {}: {} not as written; {}", checked.step,
                     checked.bad_extents == 1 ? "one extent is" : fmt::format("{} extents are", checked.bad_extents),
                     read);
}

std::string store_json(const StoreInfo& store, const std::optional<Verified>& verified) {
  rapidjson::StringBuffer buffer;
  Json json(buffer);
  json.SetIndent(' ', 2);
  json.StartObject();
  number(json, "format", store.format);
  string(json, "fingerprint", fmt::format("{:016x}", store.fingerprint));
  number(json, "blocks", store.model.blocks.size());
  number(json, "parameters", store.parameters);
  number(json, "trainable", store.trainable);
  string(json, "weights", spillway::name_of(store.weights));
  string(json, "optimizer", spillway::name_of(store.optimizer));
  number(json, "tiles", store.tiles);
  number(json, "tile_elements", store.tile_elements);
  number(json, "slots", store.slots);
  number(json, "weight_bytes", store.weight_bytes);
  number(json, "state_bytes", store.state_bytes);
  number(json, "scratch_bytes", store.scratch_bytes);
  json.Key("files");
  json.StartArray();
  for (const StoreFileInfo& file : store.files) {
    json.StartObject();
    string(json, "path", file.path.native());
    number(json, "share", file.share);
    number(json, "bytes", file.bytes);
    json.EndObject();
  }
  json.EndArray();
  write_records(json, store.records);
  number(json, "step", store.step);
  number(json, "older_step", store.older_step);
  if (store.loss_scale) {
    json.Key("loss_scale");
    json.Double(*store.loss_scale);
    number(json, "skipped_steps", store.skipped_steps);
  }
  json.Key("in_use");
  json.Bool(store.in_use);
  json.Key("damage");
  json.StartArray();
  for (const std::string& damage : damage_of(store)) json.String(damage.data());
  json.EndArray();
  if (verified) {
    json.Key("verified");
    json.StartObject();
    number(json, "step", verified->checked.step);
    number(json, "bytes", verified->checked.bytes);
    json.Key("seconds");
    json.Double(verified->seconds);
    json.Key("bad");
    json.StartArray();
    for (const BadExtent& bad : verified->bad) write_bad(json, bad);
    json.EndArray();
    json.EndObject();
  }
  json.EndObject();
  return buffer.GetString();
}

}  // namespace spillway::store
