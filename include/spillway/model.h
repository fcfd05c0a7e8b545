// The description of a model that an Engine trains: names, shapes and the order of visits; no code, no weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spillway {

struct Parameter {
  std::string name;                  // unique in the model; the tensor name in imported and exported files
  std::vector<std::uint64_t> shape;  // row-major
  bool trainable = true;             // false: weights only; no gradient, no states, never written after import
  // How often push_gradient will be called for it in one step, all visits and micro-batches together. More than one
  // costs an fp32 accumulator (4 bytes per parameter of the block) in HBM.
  std::uint32_t pushes = 1;
};

// Parameters that are gathered and released together.
struct Block {
  std::string name;
  std::vector<Parameter> parameters;
};

enum class Pass : std::uint8_t { kForward, kBackward };

// One acquire … release of a block. A block may be visited several times in a pass.
struct Visit {
  std::uint32_t block = 0;
  Pass pass = Pass::kForward;
};

// A small file that travels with the model: kept in the store, written beside exported weights (`config.json`).
struct Attachment {
  std::string name;  // a plain file name, no '/'
  std::string text;
};

struct ModelDescription {
  std::vector<Block> blocks;
  // The visits of one step in order. Empty: forward over all blocks, then backward in reverse; the first step's real
  // order replaces it.
  std::vector<Visit> visits;
  // Working memory from the HBM arena that the model asks for: handed out whole by Engine::workspace(), at an address
  // aligned to 4096, from create until destruction. What a visit needs and what is kept between visits both live in it.
  std::uint64_t workspace_bytes = 0;
  std::vector<Attachment> attachments;
};

}  // namespace spillway
