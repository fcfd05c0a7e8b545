// A model directory written from values that come block by block: which tensor of which file a parameter is. Memory:
// the writer's buffers. Thread: one. Errors: those of SafetensorsWriter.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/model.h"
#include "spillway/safetensors.h"

namespace spillway {

struct ModelWriterOptions {
  SafetensorsWriterOptions files;
  std::string suffix = {};                // after the name of every parameter
  bool trainable_only = false;            // at least one parameter must be left
  std::optional<DType> frozen_type = {};  // of those that are not trained; else that of the files
  bool attachments = true;                // the model's, too
};

class ModelWriter {
 public:
  ModelWriter(const ModelDescription& model, const std::filesystem::path& directory, ModelWriterOptions options);
  ~ModelWriter();
  ModelWriter(const ModelWriter&) = delete;
  ModelWriter& operator=(const ModelWriter&) = delete;

  // As a WeightSink takes them: block after block, inside a block by place in the flat vector.
  void write(std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<const float> values);
  void finish();
  // What the file of that attachment of the model holds.
  std::string text_of(const Attachment& attachment) const;

 private:
  const ModelDescription& model_;
  std::filesystem::path directory_;
  const ModelWriterOptions options_;
  std::vector<std::vector<std::size_t>> index_;  // of a block's parameter among the writer's tensors
  std::optional<SafetensorsWriter> writer_;
  std::vector<std::filesystem::path> leftovers_;  // attachments without their names yet
};

}  // namespace spillway
