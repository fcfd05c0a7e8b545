// Model directories in and out of the engine, tensor by tensor through small buffers.
#pragma once

#include <filesystem>

#include "spillway/engine.h"
#include "spillway/safetensors.h"

namespace spillway::models {

// The weights of a model directory, checked against a description before anything is moved: every parameter there,
// under its name or without its prefix (`transformer.`, `model.`), with its shape and a float type; nothing else but
// the buffers that old files carry (attention masks, frequencies of rotary positions), and the head of a model that has
// none of its own. The first parameter is the token embedding. Errors name file and tensor.
class ModelWeights {
 public:
  ModelWeights(const std::filesystem::path& directory, const ModelDescription& model);
  // Reads all of it to refuse, with its file and tensor, a weight that is not finite or that fp16 rounds to infinity;
  // and a tied head that is not the token embedding, which transformers would not tie: check_tied_head() alone.
  void check(DType type);
  void check_tied_head();
  // For Engine::import_weights; refers to this object.
  WeightSource source();

 private:
  SafetensorsReader reader_;
  std::vector<std::vector<const TensorEntry*>> entries_;  // [block][parameter]
  const TensorEntry* tied_head_ = nullptr;                // in the file, and no parameter
};

// The small files that travel with a model, whose tensors have that type; `directory` exists.
void write_attachments(const ModelDescription& model, const std::filesystem::path& directory, DType type);

}  // namespace spillway::models
