// Under which names files have a model's tensors, where they are others than in memory: transformers 5 fuses and
// renames some when it reads a model. An attachment says it, so that stores and snapshots know it without the run's
// program. Pure. Thread: any. Errors: kCorrupt (an attachment that says something else), kUnsupported (see below).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spillway/engine.h"
#include "spillway/export.h"
#include "spillway/model.h"

namespace spillway {

class FileNames {
 public:
  // Throws kUnsupported for a tensor that is in no file as a piece of one in memory.
  explicit FileNames(const ModelDescription& model);

  // As files have it: its tensors are whole ones of `model`, or pieces of them; without the attachment.
  const ModelDescription& model() const noexcept { return model_; }
  // Hands values of a parameter of the model in memory on as those of tensors in files, in the same order.
  void write(std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<const float> values,
             const WeightSink& sink) const;

 private:
  struct Piece {
    std::uint64_t first = 0, count = 0;  // of the parameter in memory
    std::uint32_t parameter = 0;         // of model_
  };
  ModelDescription model_;
  std::vector<std::vector<std::vector<Piece>>> pieces_;  // by block and parameter in memory, in order
};

}  // namespace spillway
