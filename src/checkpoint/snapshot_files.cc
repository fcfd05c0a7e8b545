#include "src/checkpoint/snapshot_files.h"

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "src/formats/element_count.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

bool has_parameters(const ModelDescription& model, bool trainable) {
  return std::ranges::any_of(model.blocks, [trainable](const Block& block) {
    return std::ranges::any_of(block.parameters, [trainable](const Parameter& p) { return p.trainable == trainable; });
  });
}

}  // namespace

bool TensorChecksums::add(std::uint64_t first, std::uint64_t elements, std::span<const float> values) {
  if (first == 0) running_.restart();
  running_.add(std::as_bytes(values));
  if (first + values.size() < elements) return false;
  last_ = running_.value();
  return true;
}

SnapshotFiles::SnapshotFiles(const Config& config, const ModelDescription& model,
                             const std::filesystem::path& directory, const SaveOptions& options)
    : config_(config),
      model_(model),
      leave_out_frozen_(options.leave_out_frozen && has_parameters(model, false)),
      directory_(NewDirectory::create(directory, options.replace)) {
  std::error_code ignored;
  if (options.replace && std::filesystem::exists(directory, ignored)) {
    if (read_snapshot(directory).facts.model != snapshot_fingerprint(config, model))
      throw Error(Code::kExists, {directory.string(), "is a snapshot of another model", 0, "name another directory"});
    refuse_other_files(directory);
  }
  if (leave_out_frozen_ && !has_parameters(model, true)) {
    throw Error(Code::kInvalidArgument,
                {directory.string(), "nothing of the model is trained", 0, "save it without leave_out_frozen"});
  }
  for (const Block& block : model.blocks) {
    auto& elements = elements_.emplace_back();
    for (const Parameter& parameter : block.parameters)
      elements.push_back(count_elements(parameter.name, parameter.shape));
  }
  for (const SnapshotArray what : snapshot_arrays(config.optimizer.kind, model)) {
    const bool weights = what == SnapshotArray::kWeights;
    ModelWriterOptions how;
    how.files.type = DType::kFloat32;
    how.frozen_type = config.weights;
    how.files.max_file_bytes = options.max_file_bytes;
    how.files.stem = names_of(what).stem;
    how.files.alone = false;  // but for its other arrays, the directory sees to that
    how.suffix = names_of(what).suffix;
    how.trainable_only = !weights || leave_out_frozen_;
    how.attachments = weights;
    arrays_.push_back({.what = what,
                       .writer = std::make_unique<ModelWriter>(model, directory_.path(), std::move(how)),
                       .checksums = {},
                       .seen = {}});
  }
}

void SnapshotFiles::write(std::size_t a, std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                          std::span<const float> values) {
  Array& array = arrays_[a];
  array.writer->write(block, parameter, first, values);
  if (!array.checksums.add(first, elements_[block][parameter], values)) return;
  array.seen.emplace(model_.blocks[block].parameters[parameter].name + names_of(array.what).suffix,
                     array.checksums.last());
}

void SnapshotFiles::finish(std::uint64_t step, std::span<const std::byte> blob,
                           std::span<const std::uint64_t> update_counts) {
  SnapshotRecord record;
  record.facts = {.step = step,
                  .model = snapshot_fingerprint(config_, model_),
                  .weights = config_.weights,
                  .optimizer = config_.optimizer.kind,
                  .moments = config_.moments};
  record.blob.assign(blob.begin(), blob.end());
  record.frozen_left_out = leave_out_frozen_;
  auto count = update_counts.begin();
  for (const Block& block : model_.blocks) {
    for (const Parameter& parameter : block.parameters) {
      if (update_counts.empty()) break;
      if (parameter.trainable) record.update_counts.emplace(parameter.name, *count);
      ++count;
    }
  }
  for (Array& array : arrays_) {
    array.writer->finish();
    record.checksums.merge(array.seen);
  }
  for (const Attachment& attachment : model_.attachments)
    record.attachments.emplace(attachment.name, attachment_checksum(arrays_.front().writer->text_of(attachment)));
  record.files = names_in(directory_.path());
  write_text(directory_.path() / kSnapshotFile, snapshot_text(record));
  directory_.finish();
}

}  // namespace spillway
