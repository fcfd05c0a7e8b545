// A model's next token, from weights that an engine streams and a cache of the keys and values before it.
//
// Every call of feed() visits the blocks once, in order: so weights cross each link once for a whole prompt, and once
// for each token after it. Inside a block a prompt goes slice by slice, so that memory beside its own row of tokens
// does not grow with it. All device memory is the engine's workspace, laid out here from shapes alone.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/engine.h"
#include "tools/generate/key_cache.h"
#include "tools/models/layer_forward.h"
#include "tools/models/ops/carver.h"
#include "tools/models/ops/ops.h"
#include "tools/models/trained_model.h"

namespace spillway::models::generate {

struct GeneratorOptions {
  DeviceKind device = DeviceKind::kHost;
  DType type = DType::kFloat32;
  std::uint32_t prompt = 1;     // tokens of one feed() at the most
  std::uint32_t positions = 1;  // of all of them together; what the model's rotations were made for
  std::uint32_t slice = 256;    // tokens that are inside a block at one time
  unsigned threads = 1;         // at least those of the engine
  CacheOptions cache = {};
};

// A token's row of the embedding, as fp32.
using EmbeddingRow = std::function<void(std::uint32_t token, std::span<float> row)>;

class Generator {
 public:
  // With `row` a head of its own leaves the embedding out of the engine, which would bring all of it for a few rows.
  Generator(TrainedModel model, const GeneratorOptions& options, EmbeddingRow row = {});

  // What the engine must be created with: all of it frozen. Block b of it is block b + first_block() of the model's.
  const ModelDescription& description() const { return description_; }
  std::uint32_t first_block() const { return left_out_; }
  std::vector<std::string> describe() const;
  // Once, before the first feed(); the engine must outlive this object.
  void attach(Engine& engine);

  // The logits after the last of `tokens`, which follow all that were fed before. Valid until the next call.
  std::span<const float> feed(std::span<const std::uint32_t> tokens);
  std::uint32_t fed() const { return fed_; }

 private:
  // Places in the workspace: tensors of a slice are [slice][…].
  struct Workspace {
    std::byte* scratch;
    std::uint32_t *tokens, *positions;  // of a prompt; 0, 1, … of all
    std::byte* x;                       // of a prompt
    LayerForward::Memory layer;
    LayerForward::Inside inside;
    float* logits;
    std::byte* cache;
    Workspace(Carver& carver, const Generator& generator);
  };
  // Tokens of a slice, in the row of all that was fed.
  struct Slice {
    std::uint32_t first, count;
    std::byte* x;
  };
  // What goes up and down: host memory in pages of its own, for the device registers them.
  struct Exchange {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::size_t bytes;
    std::unique_ptr<std::byte, Free> memory;
    std::span<std::uint32_t> tokens, positions;
    std::span<float> logits, rotations;
    std::span<std::byte> rows;  // of the embedding, a slice's
    explicit Exchange(const Generator& generator);
  };

  std::uint32_t block(std::uint32_t of_model) const { return of_model - left_out_; }
  std::size_t bytes_of(std::size_t elements) const { return elements * size_of(shape_.type); }
  void embed(std::span<const std::uint32_t> tokens);
  void embed_rows(std::span<const std::uint32_t> tokens);
  void forward(std::uint32_t layer, const Lease* adapters, std::uint32_t count);
  void head(const std::byte* x);
  template <typename Body>  // body(Slice)
  void for_slices(std::uint32_t count, const Body& body) const;

  TrainedModel model_;
  GeneratorOptions options_;
  EmbeddingRow row_;
  std::uint32_t left_out_;  // 1: the embedding's block
  Shape shape_;
  ModelDescription description_;
  KeyCache cache_;
  Exchange exchange_;  // outlives the operations
  std::unique_ptr<Ops> ops_;
  LayerForward layer_forward_;
  std::uint32_t fed_ = 0;
  Engine* engine_ = nullptr;
  Stream* stream_ = nullptr;
  std::unique_ptr<Workspace> work_;
};

}  // namespace spillway::models::generate
