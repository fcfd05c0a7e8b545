// A snapshot's arrays, tile by tile: out of a run and into one. Both take the tiles in order, each once; memory is one
// buffer for each array. Thread: one, the engine's. Errors: those of NewDirectory, SafetensorsWriter and -Reader, and
// kCorrupt for values that do not match their checksum.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/device.h"
#include "spillway/engine.h"
#include "spillway/safetensors.h"
#include "src/model_writer.h"
#include "src/new_directory.h"
#include "src/plan.h"
#include "src/snapshot_record.h"
#include "swap/tile_mover.h"

namespace spillway {

// The checksums of tensors whose values pass in order, one tensor behind the other.
class TensorChecksums {
 public:
  // True with the last value of a tensor of so many `elements`; its checksum is then last().
  bool add(std::uint64_t first, std::uint64_t elements, std::span<const float> values);
  std::uint64_t last() const { return last_; }

 private:
  RunningChecksum running_;
  std::uint64_t last_ = 0;
};

class SnapshotWriter {
 public:
  // Takes the space of all files: a drive without it is found here. Arrays are written side by side, on the workers.
  SnapshotWriter(const Plan& plan, const Config& config, const ModelDescription& model,
                 const std::filesystem::path& directory, const SaveOptions& options, HostWorkers& workers);

  void add(std::uint32_t tile, const TileMemory& memory);
  // `kept`: LossScaler::record().
  void finish(std::uint64_t step, std::span<const std::byte> kept);

 private:
  struct Array {
    SnapshotArray what;
    std::unique_ptr<ModelWriter> writer;
    TensorChecksums checksums;
    std::map<std::string, std::uint64_t> seen;
  };
  void add(Array& array, std::uint32_t tile, const TileMemory& memory);

  const Plan& plan_;
  const Config& config_;
  const ModelDescription& model_;
  HostWorkers& workers_;
  NewDirectory directory_;
  std::vector<Array> arrays_;  // behind the directory: they give up their files before it is given up
};

class SnapshotReader {
 public:
  // Refuses a snapshot of another model, weight type or optimizer (kInvalidArgument), naming what differs.
  SnapshotReader(const Plan& plan, const Config& config, const ModelDescription& model,
                 const std::filesystem::path& directory);

  std::uint64_t step() const { return record_.facts.step; }
  std::span<const std::byte> kept() const { return record_.blob; }
  void fill(std::uint32_t tile, const TileMemory& memory);

 private:
  struct Array {
    SnapshotArray what;
    SafetensorsReader reader;
    std::string suffix;
    TensorChecksums checksums;
  };
  void check_model(const Array& array, DType type) const;
  void read(Array& array, const Parameter& parameter, std::uint64_t first, std::span<float> out);

  const Plan& plan_;
  const ModelDescription& model_;
  const std::filesystem::path directory_;
  const SnapshotRecord record_;
  std::vector<Array> arrays_;
};

// Of EngineOptions::snapshot; null without one.
std::unique_ptr<SnapshotReader> open_snapshot(const Plan& plan, const Config& config, const ModelDescription& model,
                                              const EngineOptions& options);

}  // namespace spillway
