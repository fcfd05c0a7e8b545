#include "src/checkpoint/model_writer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "spillway/config_type.h"
#include "src/formats/plain_file.h"
#include "src/plan/partition.h"

namespace spillway {

ModelWriter::ModelWriter(const ModelDescription& model, const std::filesystem::path& directory,
                         ModelWriterOptions options)
    : model_(model), directory_(directory), options_(std::move(options)) {
  std::vector<TensorSpec> specs;
  index_.resize(model.blocks.size());
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    const auto& parameters = model.blocks[b].parameters;
    const BlockPartition partition = partition_block(model.blocks[b]);
    std::vector<std::uint32_t> order(parameters.size());
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::sort(order, {}, [&](std::uint32_t p) { return partition.parameters[p].first; });
    index_[b].resize(parameters.size());
    for (std::uint32_t p : order) {
      if (options_.trainable_only && !parameters[p].trainable) continue;
      index_[b][p] = specs.size();
      specs.push_back({parameters[p].name + options_.suffix, parameters[p].shape,
                       parameters[p].trainable ? std::nullopt : options_.frozen_type, parameters[p].bytes});
    }
  }
  writer_.emplace(SafetensorsWriter::create(directory, std::move(specs), options_.files));
}

ModelWriter::~ModelWriter() {
  for (const auto& path : leftovers_) remove_file(path);
}

void ModelWriter::write(std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                        std::span<const float> values) {
  writer_->write(index_[block][parameter], first, values);
}

std::string ModelWriter::text_of(const Attachment& attachment) const {
  return attachment.name == "config.json" ? with_type(attachment.text, options_.files.type) : attachment.text;
}

// Attachments get their names just before the weights get theirs, which make the directory a model. They keep them when
// a later file does not get its own: there may have been others of the same name, which are gone.
void ModelWriter::finish() {
  const std::size_t attachments = options_.attachments ? model_.attachments.size() : 0;
  for (std::size_t a = 0; a < attachments; ++a) {
    leftovers_.push_back(directory_ / ("." + model_.attachments[a].name + ".partial"));
    write_text(leftovers_.back(), text_of(model_.attachments[a]));
  }
  for (std::size_t a = 0; a < attachments; ++a) rename_file(leftovers_[a], directory_ / model_.attachments[a].name);
  leftovers_.clear();
  writer_->finish();
}

}  // namespace spillway
