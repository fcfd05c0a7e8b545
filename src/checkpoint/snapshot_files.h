// The files of a snapshot that is being made: a directory that is whole or not there, one array beside the other, and
// the record of what they hold. Values come as a WeightSink takes them, each array in its own time. Threads: different
// arrays at the same time, everything else one. Errors: those of NewDirectory and SafetensorsWriter.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/config.h"
#include "spillway/model.h"
#include "spillway/snapshot.h"
#include "src/checkpoint/model_writer.h"
#include "src/checkpoint/snapshot_record.h"
#include "src/formats/new_directory.h"

namespace spillway {

// The checksums of tensors whose values pass in order, one tensor after the other.
class TensorChecksums {
 public:
  // True with the last value of a tensor of so many `elements`; its checksum is then last().
  bool add(std::uint64_t first, std::uint64_t elements, std::span<const float> values);
  std::uint64_t last() const { return last_; }

 private:
  RunningChecksum running_;
  std::uint64_t last_ = 0;
};

class SnapshotFiles {
 public:
  // Takes the space of all files: a drive without it is found here. Of the configuration, weight type and optimizer
  // count. Both must outlive the files.
  SnapshotFiles(const Config& config, const ModelDescription& model, const std::filesystem::path& directory,
                const SaveOptions& options);

  std::size_t count() const { return arrays_.size(); }
  SnapshotArray array(std::size_t a) const { return arrays_[a].what; }
  bool has(std::size_t a, bool trainable) const {
    return trainable || (arrays_[a].what == SnapshotArray::kWeights && !leave_out_frozen_);
  }
  // Frozen weights are given as the run has them, rounded to its type; those that are trained exact.
  void write(std::size_t a, std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
             std::span<const float> values);
  // `update_counts`: as Manifest has them.
  void finish(std::uint64_t step, std::span<const std::byte> blob, std::span<const std::uint64_t> update_counts);

 private:
  struct Array {
    SnapshotArray what;
    std::unique_ptr<ModelWriter> writer;
    TensorChecksums checksums;
    std::map<std::string, std::uint64_t> seen;
  };

  const Config& config_;
  const ModelDescription& model_;
  const bool leave_out_frozen_;
  std::vector<std::vector<std::uint64_t>> elements_;  // [block][parameter]
  NewDirectory directory_;
  std::vector<Array> arrays_;  // after the directory: they give up their files before it is given up
};

}  // namespace spillway
