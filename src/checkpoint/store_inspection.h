// How a store is looked at without the run that made it: its description gives the plan back that its layout follows
// from. The functions of spillway/store.h for one store are here, those for the stores of several ranks in
// run_inspection.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "spillway/store.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "swap/store_files.h"
#include "swap/tile_store.h"

namespace spillway {

// What a store says it is a store of, checked against the room that it has: what is made of it is bounded by the files.
// Throws kCorrupt, kInvalidArgument (an impossible shape).
StoredModel read_stored_model(const StoreFiles& files);
// The plan of a run that has all of the store's tiles on NVMe.
Plan plan_of_store(const StoredModel& stored, const std::vector<std::filesystem::path>& paths);

// A store that is open, to look at it or to go back in it, and what can be derived from it.
struct OpenStore {
  OpenStore(StoreFiles opened, const std::vector<std::filesystem::path>& paths);

  const std::string& object() const { return object_; }  // for messages
  std::string name_of(std::uint32_t tile) const { return tile_name(plan, stored.model, tile); }
  StoreShape shape() const;  // with those names; valid as long as this is

  StoreFiles files;
  StoredModel stored;
  Plan plan;
  StoreLayout layout;
  ManifestChoice choice;

 private:
  std::string object_;
};

StoreInfo info_of(const OpenStore& store);
// kBusy, kUnsupported, kCorrupt where there is nothing to verify.
void refuse_to_verify(const OpenStore& store);
// Bytes of any of its steps.
std::uint64_t step_bytes(const StoreLayout& layout);
CheckedStore verify_step(OpenStore& store, const Manifest& manifest, const CheckOptions& options);

}  // namespace spillway
