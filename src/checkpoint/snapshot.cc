#include "src/checkpoint/snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "kernels/moments.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/checkpoint/tile_values.h"
#include "src/formats/refuse.h"
#include "src/plan/state_sections.h"

namespace spillway {
namespace {

Moment moment_kept_as(SnapshotArray array) {
  return array == SnapshotArray::kExpAvg ? Moment::kExpAvg : Moment::kExpAvgSq;
}

}  // namespace

SnapshotWriter::SnapshotWriter(const Config& config, const ModelDescription& model,
                               const std::filesystem::path& directory, const SaveOptions& options, HostWorkers& workers)
    : workers_(workers), files_(config, model, directory, options) {}

void SnapshotWriter::add(const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
  std::vector<std::exception_ptr> failures(files_.count());
  workers_.parallel_for(files_.count(), [&](std::size_t a) {
    try {
      add(a, plan, tile, memory);
    } catch (...) {
      failures[a] = std::current_exception();
    }
  });
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void SnapshotWriter::add(std::size_t array, const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
  const SnapshotArray what = files_.array(array);
  if (!files_.has(array, plan.tile_places[tile].shape.trainable)) return;
  const WeightSink sink = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first,
                              std::span<const float> values) { files_.write(array, block, p, first, values); };
  if (what == SnapshotArray::kWeights) return read_tile(plan, tile, memory, true, sink);
  read_moment(plan, tile, memory, moment_kept_as(what), sink);
}

void SnapshotWriter::finish(std::uint64_t step, std::span<const std::byte> kept,
                            std::span<const std::uint64_t> update_counts) {
  files_.finish(step, kept, update_counts);
}

SnapshotReader::SnapshotReader(const Plan& plan, const Config& config, const ModelDescription& model,
                               const std::filesystem::path& directory)
    : plan_(plan), config_(config), model_(model), directory_(directory) {
  read_snapshot(directory, [&](const SnapshotRecord& record) {
    record_ = record;
    open_arrays(config);
    check_attachments(record, directory_);
  });
  if (record_.facts.moments == config.moments) return;
  log(LogLevel::kInfo, fmt::format("{}: its {} states become {}", directory.string(), name_of(record_.facts.moments),
                                   name_of(config.moments)));
}

void SnapshotReader::open_arrays(const Config& config) {
  const auto differs = [&](const char* what, std::string_view there, std::string_view here) {
    if (there == here) return;
    refuse(directory_, fmt::format("is of a run with {} {}, this one has {}", what, there, here),
           "begin with it as it was made, or with its model alone");
  };
  differs("weights in", name_of(record_.facts.weights), name_of(config.weights));
  differs("the optimizer", name_of(record_.facts.optimizer), name_of(config.optimizer.kind));
  arrays_.clear();
  for (const SnapshotArray what : snapshot_arrays(config.optimizer.kind, model_)) {
    const SnapshotArrayNames names = names_of(what);
    arrays_.push_back({.what = what,
                       .reader = SafetensorsReader::open(directory_, names.stem),
                       .suffix = names.suffix,
                       .checksums = {}});
    check_model(arrays_.back(), config.weights);
  }
}

// The array has every parameter that it should, and no other; frozen weights in the type of training.
void SnapshotReader::check_model(const Array& array, DType frozen_type) const {
  const std::string hint = "restore it with the model that it was made with";
  std::size_t expected = 0;
  for (const Block& block : model_.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const std::string name = parameter.name + array.suffix;
      const TensorEntry* entry = array.reader.find(name);
      if (!parameter.trainable && (array.what != SnapshotArray::kWeights || record_.frozen_left_out)) {
        if (entry) refuse(directory_, fmt::format("parameter {} was trained there, here it is frozen", name), hint);
        continue;
      }
      ++expected;
      if (!entry) refuse(directory_, fmt::format("it has no tensor {}", name), hint);
      if (entry->shape != parameter.shape)
        refuse(array.reader.file(*entry), fmt::format("tensor {} has another shape than here", name), hint);
      const DType type = parameter.trainable ? DType::kFloat32 : frozen_type;
      const bool bits = entry->dtype == (size_of(frozen_type) == 4 ? "U32" : "U16");
      if (parameter.bytes && bits && record_.checksums.contains(name)) continue;
      if (parameter.bytes != bits) {
        refuse(directory_,
               fmt::format("parameter {} was {} there, here it is {}", name, bits ? "bytes" : "numbers",
                           bits ? "numbers" : "bytes, as of a quantized weight"),
               hint);
      }
      if (entry->type != type && (entry->type == DType::kFloat32 || entry->type == frozen_type)) {
        refuse(directory_,
               fmt::format("parameter {} was {} there, here it is {}", name, parameter.trainable ? "frozen" : "trained",
                           parameter.trainable ? "trained" : "frozen"),
               hint);
      }
      if (entry->type != type || !record_.checksums.contains(name))
        refuse(array.reader.file(*entry), fmt::format("tensor {} is not as it was written", name), "take another one");
    }
  }
  if (array.reader.tensors().size() != expected) {
    refuse(directory_,
           fmt::format("{} tensors of {} are no part of this model", array.reader.tensors().size() - expected,
                       names_of(array.what).stem),
           hint);
  }
}

std::vector<std::uint64_t> SnapshotReader::update_counts() const {
  std::vector<std::uint64_t> counts;
  if (record_.update_counts.empty()) return counts;
  for (const Block& block : model_.blocks) {
    for (const Parameter& parameter : block.parameters) {
      const auto found = record_.update_counts.find(parameter.name);
      if (parameter.trainable && found == record_.update_counts.end()) {
        throw Error(Code::kCorrupt,
                    {(directory_ / kSnapshotFile).string(),
                     fmt::format("has no count of the updates of {}", parameter.name), 0, "restore another snapshot"});
      }
      counts.push_back(parameter.trainable ? found->second : 0);
    }
  }
  return counts;
}

// It is what the tensor holds when its checksum is right, and damage otherwise: that is known at its end.
void SnapshotReader::note_unstorable(Array& array, const Parameter& parameter, std::uint64_t first,
                                     std::span<const float> values) const {
  if (first == 0) array.unstorable = nullptr;
  if (array.what == SnapshotArray::kWeights || array.unstorable) return;
  try {
    check_moments(parameter, moment_kept_as(array.what), format_of(config_, parameter), first, values);
  } catch (const Error&) {
    array.unstorable = std::current_exception();
  }
}

void SnapshotReader::read(Array& array, const Parameter& parameter, std::uint64_t first, std::span<float> out) {
  const std::string name = parameter.name + array.suffix;
  const TensorEntry* entry = array.reader.find(name);
  if (parameter.bytes)
    array.reader.read_bits(*entry, first, out);
  else
    array.reader.read(*entry, first, out);
  note_unstorable(array, parameter, first, out);
  if (plan_.rank.count > 1 && verified_) return;
  if (!array.checksums.add(first, entry->elements, out)) return;
  if (array.checksums.last() == record_.checksums.at(name)) {
    if (array.unstorable) std::rethrow_exception(array.unstorable);
    return;
  }
  throw Error(Code::kCorrupt,
              {array.reader.file(*entry).string(), fmt::format("tensor {} does not match its checksum", name), 0,
               "check the drive; restore another snapshot"});
}

void SnapshotReader::fill(std::uint32_t tile, const TileMemory& memory) {
  const bool trainable = plan_.tile_places[tile].shape.trainable;
  for (Array& array : arrays_) {
    if (!trainable && array.what != SnapshotArray::kWeights) continue;
    const WeightSource source = [&](std::uint32_t block, std::uint32_t p, std::uint64_t first, std::span<float> out) {
      read(array, model_.blocks[block].parameters[p], first, out);
    };
    if (array.what == SnapshotArray::kWeights) {
      fill_tile(plan_, tile, memory, source);
    } else {
      fill_moment(plan_, tile, memory, moment_kept_as(array.what), source,
                  rounding_key(config_.optimizer.seed, step()));
    }
  }
}

void SnapshotReader::verify(const std::function<void()>& goes_on) {
  verified_ = false;
  std::vector<float> values(64 * kKiB);
  for (Array& array : arrays_) {
    for (const Block& block : model_.blocks) {
      for (const Parameter& parameter : block.parameters) {
        const TensorEntry* entry = array.reader.find(parameter.name + array.suffix);
        for (std::uint64_t at = 0; entry && at < entry->elements; at += values.size()) {
          read(array, parameter, at,
               std::span(values).first(std::min<std::uint64_t>(values.size(), entry->elements - at)));
          if (goes_on) goes_on();
        }
      }
    }
  }
  verified_ = true;
}

std::unique_ptr<SnapshotReader> open_snapshot(const Plan& plan, const Config& config, const ModelDescription& model,
                                              const EngineOptions& options) {
  if (options.snapshot.empty()) return nullptr;
  if (options.on_existing == OnExisting::kResume)
    refuse(options.snapshot, "cannot be restored into a store that is resumed", "do one or the other");
  auto reader = std::make_unique<SnapshotReader>(plan, config, model, options.snapshot);
  if (!reader->has_frozen()) {
    refuse(options.snapshot, "was saved without the frozen weights",
           "make the engine with the model's own, and then call load_snapshot()");
  }
  return reader;
}

}  // namespace spillway
