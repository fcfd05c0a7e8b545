#include "tools/store/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <string_view>
#include <system_error>

#include "tools/terminal/amount.h"
#include "tools/terminal/json.h"

namespace spillway::store {
namespace {

using terminal::fixed_text_of_size;
using terminal::Json;

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

// One line of what is said of a store or a run.
void put_line(std::string& text, std::string_view what, const std::string& said) {
  fmt::format_to(std::back_inserter(text), "{:<9} {}\n", what, said);
}

// What the stores of all ranks say alike.
void put_model(std::string& text, const StoreInfo& store) {
  put_line(
      text, "model",
      fmt::format("{} of {} parameters, {} of them trained; fingerprint {:016x}",
                  plural(store.model.blocks.size(), "block"), store.parameters, store.trainable, store.fingerprint));
  for (const Attachment& attachment : store.model.attachments) {
    put_line(text, "", fmt::format("with {}, {}", attachment.name, plural(attachment.text.size(), "byte")));
  }
  const bool exact = store.moments == MomentFormat::kFloat32;
  put_line(text, "types",
           fmt::format("{} weights, optimizer {}{}; store format {}", spillway::name_of(store.weights),
                       spillway::name_of(store.optimizer),
                       exact ? "" : fmt::format(", {} states", spillway::name_of(store.moments)), store.format));
}

void put_sizes(std::string& text, std::uint64_t weights, std::uint64_t states, std::uint64_t scratch) {
  put_line(text, "sizes",
           fmt::format("weights {}, states {} in one slot of all tiles; scratch {}", fixed_text_of_size(weights),
                       fixed_text_of_size(states), fixed_text_of_size(scratch)));
}

void put_loss_scale(std::string& text, const StoreInfo& store) {
  if (!store.loss_scale) return;
  put_line(text, "scale",
           fmt::format("{} is the loss scale of the next step; {} skipped so far", *store.loss_scale,
                       plural(store.skipped_steps, "step")));
}

void put_bad(Json& json, const BadExtent& bad) {
  json.put("name", bad.name);
  json.put("file", bad.file);
  json.put("offset", bad.offset);
  json.put("bytes", bad.bytes);
  json.put("errno", bad.error);
}

void put_copy(Json& json, const RecordCopy& copy) {
  json.put("state", name_of(copy.state));
  if (copy.state != RecordState::kValid) return;
  json.put("commit", copy.sequence);
  json.put("step", copy.step);
}

}  // namespace

std::vector<std::string> damage_of(const StoreInfo& store) {
  std::vector<std::string> damage;
  for (const StoreFileInfo& file : store.files) {
    if (!file.superblock_damaged) continue;
    damage.push_back(fmt::format("one of the two superblocks of {}: the next run that opens the store writes it anew",
                                 file.path.string()));
  }
  if (store.in_use || store.slots < 2) return damage;
  if (!store.step) {
    damage.emplace_back("no committed step: all of its records are damaged");
  } else if (store.newest_lost) {
    damage.push_back(fmt::format(
        "the newest record and its copy are damaged: the next run goes back to step {} if all of it is intact",
        *store.step));
  }
  return damage;
}

std::string store_text(const StoreInfo& store) {
  std::string text;
  const auto line = [&](const char* what, const std::string& said) { put_line(text, what, said); };
  put_model(text, store);
  if (!store.run.empty()) line("run", fmt::format("{}, rank {} of {}", store.run, store.rank, store.ranks));
  line("tiles", fmt::format("{} of at most {} elements, {} each, whatever tier they live in during a run", store.tiles,
                            store.tile_elements, plural(store.slots, "slot")));
  put_sizes(text, store.weight_bytes, store.state_bytes, store.scratch_bytes);
  for (const StoreFileInfo& file : store.files) {
    std::uint64_t shares = 0;
    for (const StoreFileInfo& other : store.files) shares += other.share;
    line("file",
         fmt::format("{}, {}, {} of {} parts", file.path.string(), fixed_text_of_size(file.bytes), file.share, shares));
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
  put_loss_scale(text, store);
  line("lock", store.in_use ? "held by a running process, which may be writing a record just now" : "free");
  for (const std::string& damage : damage_of(store)) line("DAMAGED", damage);
  return text;
}

std::vector<std::string> damage_of(const RunInfo& run) {
  std::vector<std::string> damage;
  bool quiet = true, keeps_steps = true;
  for (const StoreInfo& store : run.ranks) {
    for (const std::string& one : damage_of(store)) damage.push_back(fmt::format("rank {}: {}", store.rank, one));
    quiet &= !store.in_use;
    keeps_steps &= store.slots >= 2;
  }
  if (damage.empty() && quiet && keeps_steps && !run.step)
    damage.push_back("the ranks have no step in common: " + run.steps);
  return damage;
}

std::string run_text(const RunInfo& run) {
  std::string text;
  const auto line = [&](std::string_view what, const std::string& said) { put_line(text, what, said); };
  const StoreInfo& first = run.ranks.front();
  put_model(text, first);
  line("run", fmt::format("{}, {}", first.run, plural(run.ranks.size(), "rank")));
  std::uint64_t weights = 0, states = 0, scratch = 0;
  for (const StoreInfo& store : run.ranks) {
    weights += store.weight_bytes;
    states += store.state_bytes;
    scratch += store.scratch_bytes;
    std::uint64_t bytes = 0;
    std::string paths;
    for (const StoreFileInfo& file : store.files) {
      bytes += file.bytes;
      paths += (paths.empty() ? "" : ", ") + file.path.string();
    }
    line(fmt::format("rank {}", store.rank), fmt::format("{}, {}, {}{}", paths, fixed_text_of_size(bytes),
                                                         plural(store.tiles, "tile"), store.in_use ? "; in use" : ""));
  }
  put_sizes(text, weights, states, scratch);
  if (first.slots < 2) {
    line("step", "none is kept: made with commit_every 0");
  } else {
    line("steps", run.steps);
    line("step", run.step ? fmt::format("{}, the newest that all have", *run.step) : "none that all have");
  }
  put_loss_scale(text, first);
  for (const std::uint32_t rank : run.unnamed)
    line("", fmt::format("rank {}'s replaces another store: that was cut short, and the next run finishes it", rank));
  for (const auto& other : run.others) line("", fmt::format("{} is of another run", other.string()));
  for (const std::string& damage : damage_of(run)) line("DAMAGED", damage);
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
      fmt::format("{} read in {:.1f} s, {:.2f} GB/s", fixed_text_of_size(checked.bytes), verified.seconds, rate);
  if (checked.bad_extents == 0) return fmt::format("verified  step {}: every byte is intact; {}", checked.step, read);
  return fmt::format("DAMAGED   step {}: {} not as written; {}", checked.step,
                     checked.bad_extents == 1 ? "one extent is" : fmt::format("{} extents are", checked.bad_extents),
                     read);
}

namespace {

void put_store(Json& json, const StoreInfo& store) {
  json.put("format", store.format);
  json.put("fingerprint", fmt::format("{:016x}", store.fingerprint));
  json.put("run", store.run);
  json.put("rank", store.rank);
  json.put("ranks", store.ranks);
  json.put("blocks", store.model.blocks.size());
  json.put("parameters", store.parameters);
  json.put("trainable", store.trainable);
  json.put("weights", spillway::name_of(store.weights));
  json.put("optimizer", spillway::name_of(store.optimizer));
  json.put("states", spillway::name_of(store.moments));
  json.put("tiles", store.tiles);
  json.put("tile_elements", store.tile_elements);
  json.put("slots", store.slots);
  json.put("weight_bytes", store.weight_bytes);
  json.put("state_bytes", store.state_bytes);
  json.put("scratch_bytes", store.scratch_bytes);
  json.list("files", [&] {
    for (const StoreFileInfo& file : store.files) {
      json.item([&] {
        json.put("path", file.path);
        json.put("share", file.share);
        json.put("bytes", file.bytes);
      });
    }
  });
  json.list("records", [&] {
    for (const auto& record : store.records) {
      json.list([&] {
        for (const RecordCopy& copy : record) json.item([&] { put_copy(json, copy); });
      });
    }
  });
  json.put("step", store.step);
  json.put("older_step", store.older_step);
  if (store.loss_scale) {
    json.put("loss_scale", *store.loss_scale);
    json.put("skipped_steps", store.skipped_steps);
  }
  json.put("in_use", store.in_use);
  json.put("damage", damage_of(store));
}

void put_verified(Json& json, const std::optional<Verified>& verified) {
  if (!verified) return;
  json.put("verified", [&] {
    json.put("step", verified->checked.step);
    json.put("bytes", verified->checked.bytes);
    json.put("seconds", verified->seconds);
    json.list("bad", [&] {
      for (const BadExtent& bad : verified->bad) json.item([&] { put_bad(json, bad); });
    });
  });
}

}  // namespace

std::string store_json(const StoreInfo& store, const std::optional<Verified>& verified) {
  Json json;
  put_store(json, store);
  put_verified(json, verified);
  return json.text();
}

std::string run_json(const RunInfo& run, const std::optional<Verified>& verified) {
  Json json;
  json.put("run", run.ranks.front().run);
  json.list("ranks", [&] {
    for (const StoreInfo& store : run.ranks) json.item([&] { put_store(json, store); });
  });
  json.put("step", run.step);
  json.put("unnamed", run.unnamed);
  json.put("others", run.others);
  json.put("damage", damage_of(run));
  put_verified(json, verified);
  return json.text();
}

}  // namespace spillway::store
