// spillway.json of a snapshot without its last lines, the checksum; also as it is.
#include "src/checkpoint/snapshot_record.h"

#include <fmt/format.h>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "tests/fuzz/targets.h"

namespace spillway::fuzz {
namespace {

void parse(const std::string& text) {
  const auto record = accepted([&] { return parse_snapshot(text, "spillway.json"); });
  if (!record) return;
  const SnapshotRecord again = parse_snapshot(snapshot_text(*record), "spillway.json");
  SPILLWAY_CHECK(again.facts.step == record->facts.step && again.facts.model == record->facts.model &&
                     again.facts.weights == record->facts.weights && again.facts.optimizer == record->facts.optimizer &&
                     again.facts.moments == record->facts.moments,
                 "the facts are the same when they are read again");
  SPILLWAY_CHECK(again.blob == record->blob && again.files == record->files && again.checksums == record->checksums &&
                     again.update_counts == record->update_counts && again.attachments == record->attachments,
                 "and so is the rest");
}

}  // namespace

void snapshot_record(Bytes input) {
  const std::string text(text_of(input));
  parse(text);
  parse(fmt::format("{}  \"checksum\": \"{:016x}\"\n}}\n", text, granule_checksum(input)));
}

}  // namespace spillway::fuzz
