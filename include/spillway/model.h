// The description of a model that an Engine trains: names, shapes and the order of visits; no code, no weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spillway/dtype.h"

namespace spillway {

// Any number of gradients in a step: a push without data says that no more come.
inline constexpr std::uint32_t kAnyPushes = UINT32_MAX;

struct Parameter {
  std::string name;                  // unique in the model; the tensor name in imported and exported files
  std::vector<std::uint64_t> shape;  // row-major
  bool trainable = true;             // false: weights only; no gradient, no states, never written after import
  // How often push_gradient will be called for it in one step, all visits and micro-batches together, with a gradient
  // or to say that there is none. More than one costs an fp32 accumulator, 4 bytes per parameter. The blocks that
  // `visits` has once in backward share one; the others, and those with kAnyPushes, have one each, in HBM, or in host
  // memory where an explicit hbm_bytes has no room. With Config::sum_groups the number of pushes is a multiple of these
  // groups, and an accumulator is log2(sum_groups) + 1 times as large.
  std::uint32_t pushes = 1;
  // All pushes of a micro-batch come before those of the next one. With false (tied weights, for example: the head has
  // seen every micro-batch before the embedding sees one) the block's accumulator is sum_groups times as large.
  bool in_order = true;
  // Frozen bytes of the program's own, such as a quantized weight with its scales: Spillway neither interprets nor
  // converts them. `shape` counts the elements of the weight type that they take; in the fp32 values of sources and
  // sinks the bits of a 16-bit element are the upper half. Exports, which are models in files, refuse such a parameter.
  bool bytes = false;
};

// Parameters that are gathered and released together.
struct Block {
  std::string name;
  std::vector<Parameter> parameters;
  // Inner activations: what a visit computes for one micro-batch and the backward visit needs again. Those of all
  // micro-batches are kept where HBM has room for them; else backward computes them again. Engine::insides() hands the
  // memory out.
  std::uint64_t inside_bytes = 0;
  // Acquired around visits of other blocks, as small tensors that many of these need: it has a place of its own in HBM,
  // and its visits count as work of those inside.
  bool held = false;
};

enum class Pass : std::uint8_t { kForward, kBackward };

// One acquire … release of a block. A block may be visited several times in a pass.
struct Visit {
  std::uint32_t block = 0;
  Pass pass = Pass::kForward;
  bool operator==(const Visit&) const = default;
};

// A tensor that lives from one visit to another within a step, such as the input of a block for one micro-batch. What
// it holds is lost between steps.
struct Activation {
  std::uint64_t bytes = 0;
};

enum class Access : std::uint8_t {
  kRead,
  kWrite,   // every byte that is read later; what was there is lost
  kUpdate,  // reads and writes
};

// One acquire … release of an activation.
struct ActivationUse {
  std::uint32_t activation = 0;
  Access access = Access::kRead;
  std::uint32_t visit = 0;  // that it lies within, for predictions: index in ModelDescription::visits; never decreases
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
  // aligned to 4096, from create until destruction. What a visit needs lives in it.
  std::uint64_t workspace_bytes = 0;
  // What is kept between visits, and the uses of one step in order. With an order the plan moves what does not fit HBM
  // to host memory or NVMe and back in time; without one, all of them stay in HBM.
  std::vector<Activation> activations;
  std::vector<ActivationUse> activation_uses;
  std::uint32_t activations_held = 1;  // the most that are acquired at one time
  std::uint32_t micro_batches = 1;     // of a step: of how many a block's inner activations are kept
  // What the program itself keeps between visits (a PyTorch loop's block inputs, for example): the most at one time. It
  // counts in the budgets, and the engine does not allocate it. What host memory has no room for goes to the store's
  // drives; the ledger says how much is where. `kept_moving_bytes`: what is in host memory in any case.
  std::uint64_t kept_host_bytes = 0, kept_nvme_bytes = 0, kept_moving_bytes = 0;
  std::vector<Attachment> attachments;
  // The types of weights that the program's arithmetic handles. A configuration of another (`bf16.enabled`, say) is
  // refused (kUnsupported) before anything is reserved. Empty: any. Neither stores nor snapshots keep it.
  std::vector<DType> weight_types;
};

}  // namespace spillway
