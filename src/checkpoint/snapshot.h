// A snapshot's arrays, tile by tile: out of a run and into one. Both take the tiles in order, each once; memory is one
// buffer for each array. Thread: one, the engine's. Errors: those of NewDirectory, SafetensorsWriter and -Reader, and
// kCorrupt for values that do not match their checksum.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/device.h"
#include "spillway/engine.h"
#include "spillway/safetensors.h"
#include "src/checkpoint/snapshot_files.h"
#include "src/checkpoint/snapshot_record.h"
#include "src/plan/plan.h"
#include "swap/tile_mover.h"

namespace spillway {

class SnapshotWriter {
 public:
  // Takes the space of all files: a drive without it is found here. Arrays are written side by side, on the workers.
  SnapshotWriter(const Config& config, const ModelDescription& model, const std::filesystem::path& directory,
                 const SaveOptions& options, HostWorkers& workers);

  // `plan`: whose tile it is, of this rank or of another.
  void add(const Plan& plan, std::uint32_t tile, const TileMemory& memory);
  // `kept`: LossScaler::record(). `update_counts`: as Manifest has them.
  void finish(std::uint64_t step, std::span<const std::byte> kept, std::span<const std::uint64_t> update_counts);

 private:
  void add(std::size_t array, const Plan& plan, std::uint32_t tile, const TileMemory& memory);

  HostWorkers& workers_;
  SnapshotFiles files_;
};

class SnapshotReader {
 public:
  // Refuses a snapshot of another model, weight type or optimizer (kInvalidArgument), naming what differs.
  SnapshotReader(const Plan& plan, const Config& config, const ModelDescription& model,
                 const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  std::uint64_t step() const { return record_.facts.step; }
  // Of all that its record says, with the checksums of what it holds: equal for copies of one snapshot alone.
  std::uint64_t identity() const { return attachment_checksum(snapshot_text(record_)); }
  // False: fill() is for trained tiles alone.
  bool has_frozen() const { return !record_.frozen_left_out; }
  std::span<const std::byte> kept() const { return record_.blob; }
  std::vector<std::uint64_t> update_counts() const;  // as Manifest has them
  void fill(std::uint32_t tile, const TileMemory& memory);
  // Reads everything once, before anything is given up for it. With several ranks it comes before fill(): of a tensor
  // each reads a part, of which no checksum is known. `goes_on`: is called again and again meanwhile.
  void verify(const std::function<void()>& goes_on = {});

 private:
  struct Array {
    SnapshotArray what;
    SafetensorsReader reader;
    std::string suffix;
    TensorChecksums checksums;
    std::exception_ptr unstorable = nullptr;  // of the tensor that passes
  };
  void open_arrays(const Config& config);
  void check_model(const Array& array, DType frozen_type) const;
  void note_unstorable(Array& array, const Parameter& parameter, std::uint64_t first,
                       std::span<const float> values) const;
  void read(Array& array, const Parameter& parameter, std::uint64_t first, std::span<float> out);

  const Plan& plan_;
  const Config& config_;
  const ModelDescription& model_;
  const std::filesystem::path directory_;
  SnapshotRecord record_;
  std::vector<Array> arrays_;
  bool verified_ = false;
};

// Of EngineOptions::snapshot; null without one.
std::unique_ptr<SnapshotReader> open_snapshot(const Plan& plan, const Config& config, const ModelDescription& model,
                                              const EngineOptions& options);

}  // namespace spillway
