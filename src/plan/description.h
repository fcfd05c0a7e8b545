// What a store says of itself: the model and the settings that its layout follows from, as JSON inside the store file,
// so that a store can be exported without the configuration that made it.
#pragma once

#include <cstdint>
#include <string>

#include "spillway/config.h"
#include "spillway/model.h"
#include "spillway/remedy.h"
#include "swap/store_shape.h"

namespace spillway {

// The fingerprint covers parameters (names, shapes, order, frozen or not, other states), weight type, optimizer and
// tile size: whatever must be equal for a store's bytes to mean the same. Attachments and visits are not part of it.
StoreIdentity describe_store(const Config& config, const ModelDescription& model);
// The same of what lies where alone, whatever the states of its parameters are described as.
std::uint64_t layout_fingerprint(const ModelDescription& model, DType weights, OptimizerKind optimizer,
                                 std::uint64_t tile_elements);

// What a store was made with and a run has otherwise, as text: `bf16 weights (here: fp32), 5 blocks (here: 4)`. Of the
// parameters, the first that differs. Empty: nothing that the fingerprint covers. Throws as parse_store_description.
std::string description_difference(const std::string& stored, const std::string& wanted);

// Where states alone differ a snapshot converts them.
Remedy difference_remedy(const std::string& stored, const std::string& wanted);

struct StoredModel {
  ModelDescription model;  // visits empty
  DType weights = DType::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kAdam;
  std::uint64_t tile_elements = 0;
  MomentFormat moments = MomentFormat::kFloat32;  // of the parameters that are not among the exact ones
  std::vector<std::string> exact_states = {};     // names; see Config
  std::uint32_t sum_groups = 1;                   // and so many gradients a step does each parameter of `model` expect
  std::uint64_t fingerprint = 0;
  Rank rank = {};  // whose part of it a store has; its superblock says so
};

// Weights, optimizer, tiles and states as a store was made with; all else as it is without a configuration.
Config config_of(const StoredModel& stored);

// Throws kCorrupt (`object` in the message) when the text is not such a description, kUnsupported when it tells of
// state arrays that this version does not know.
StoredModel parse_store_description(const std::string& text, const std::string& object);

}  // namespace spillway
