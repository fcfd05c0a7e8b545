// Keys and values of the tokens so far, in the tier that has room for them.
//
// A layer has [positions][2][kv_heads * head_width] elements. In HBM they stay where they are used. Elsewhere HBM has
// one layer's, and its rows come before its visit and go after it: down to host memory, and from there to a file.
// The engine's activations are no place for them: those are lost between steps, and one that is updated goes back
// whole, where a token adds one row.
//
//   file (nvme)  ──read ahead, the next layer's──►  host, two layers' ──upload──►  HBM, one layer's
//   host         ──────────────────────────────────────────────────────upload──►
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/engine.h"
#include "spillway/io_queue.h"
#include "spillway/placement.h"
#include "tools/models/ops/ops.h"

namespace spillway::models::generate {

struct CacheOptions {
  Placement tier = Placement::kHbm;
  std::filesystem::path directory = {};  // of the file, on nvme; the file has no name there
};

class KeyCache {
 public:
  KeyCache(const CacheOptions& options, const Shape& shape, std::uint32_t layers);
  ~KeyCache();
  KeyCache(const KeyCache&) = delete;
  KeyCache& operator=(const KeyCache&) = delete;

  std::uint64_t device_bytes() const { return layer_bytes() * (tier_ == Placement::kHbm ? layers_ : 1); }
  std::uint64_t host_bytes() const;
  std::uint64_t nvme_bytes() const { return tier_ == Placement::kNvme ? layer_bytes() * layers_ : 0; }
  std::string describe() const;

  // Takes its memory; `device` has device_bytes(), aligned to 64.
  void attach(Ops& ops, std::byte* device);
  // A layer's rows on the device: [0, past) are there, with room for those after. Layers come in order, from the first
  // one in every pass.
  std::byte* begin(std::uint32_t layer, std::uint32_t past, Stream& stream);
  // Rows [past, past + count) were added by work on the stream.
  void end(std::uint32_t layer, std::uint32_t past, std::uint32_t count, Stream& stream);

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::uint64_t layer_bytes() const { return align_up<std::uint64_t>(positions_ * row_bytes_, 4096); }
  std::byte* host_layer(std::uint32_t layer) const {
    return host_.get() + (tier_ == Placement::kNvme ? layer % 2 : layer) * layer_bytes();
  }
  void free_buffer(std::uint32_t layer);
  void read_ahead(std::uint32_t layer, std::uint32_t past);
  void wait_for(std::uint64_t tag);

  const Placement tier_;
  const std::filesystem::path directory_;
  const std::uint64_t positions_, row_bytes_;
  const std::uint32_t layers_;
  Ops* ops_ = nullptr;
  std::byte* device_ = nullptr;
  std::unique_ptr<std::byte, Free> host_;
  std::optional<File> file_;
  std::unique_ptr<IoQueue> queue_;
  std::vector<bool> pending_;  // by tag
};

}  // namespace spillway::models::generate
