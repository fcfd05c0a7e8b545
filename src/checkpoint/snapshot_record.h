// spillway.json, which makes a directory a snapshot and says what is in it. It is the last file that is written, and
// its last line is a checksum of those before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "spillway/model.h"
#include "spillway/snapshot.h"
#include "src/formats/plain_file.h"

namespace spillway {

inline constexpr const char* kSnapshotFile = "spillway.json";

// The arrays of a parameter that a snapshot keeps, each in files of its own.
enum class SnapshotArray : std::uint8_t { kWeights, kExpAvg, kExpAvgSq };

struct SnapshotArrayNames {
  std::string stem;    // of the files
  std::string suffix;  // after the parameter's name
};
SnapshotArrayNames names_of(SnapshotArray array);

// Those that a run has: the weights, and what `optimizer` keeps of trainable parameters, if there are any.
std::vector<SnapshotArray> snapshot_arrays(OptimizerKind optimizer, const ModelDescription& model);

struct SnapshotRecord {
  SnapshotInfo facts;
  std::vector<std::byte> blob;                       // the caller's; in fp16 after a LossScalerState
  std::vector<std::string> files;                    // of the directory, but for this one
  std::map<std::string, std::uint64_t> checksums;    // by tensor: XXH3 of its values, row-major, as fp32
  std::map<std::string, std::uint64_t> attachments;  // by file: XXH3 of its text; none in records of older versions
  // By trainable parameter. None: each has had every update that was not skipped.
  std::map<std::string, std::uint64_t> update_counts;
  bool frozen_left_out = false;  // it has only what is trained
};

// SnapshotRecord::attachments of a text.
std::uint64_t attachment_checksum(std::string_view text);

// SnapshotInfo::model: of what must be equal for a snapshot to fit a run.
std::uint64_t snapshot_fingerprint(const Config& config, const ModelDescription& model);

std::string snapshot_text(const SnapshotRecord& record);
// `object` stands in errors: kCorrupt (not what snapshot_text() wrote), kUnsupported (a newer format).
SnapshotRecord parse_snapshot(const std::string& text, const std::string& object);

// Throws kNotFound (no snapshot), kIo and the above.
SnapshotRecord read_snapshot(const std::filesystem::path& directory);
// The same, with what `open`, which receives it, opens of the directory: once more where a run has replaced the
// snapshot meanwhile, so that both are of one.
SnapshotRecord read_snapshot(const std::filesystem::path& directory,
                             const std::function<void(const SnapshotRecord& record)>& open);
// The text of an attachment. Throws kCorrupt where it is not the one that was written.
std::string read_attachment(const SnapshotRecord& record, const std::filesystem::path& directory,
                            const std::string& name, Links links = Links::kFollow);
void check_attachments(const SnapshotRecord& record, const std::filesystem::path& directory);
// Throws kInvalidArgument when the directory holds a file that was not saved with its snapshot.
void refuse_other_files(const std::filesystem::path& directory);

}  // namespace spillway
