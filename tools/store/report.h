// What `spillway store` says of a store, or of those of all ranks of a run, for people and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spillway/store.h"

namespace spillway::store {

// What reading every byte has shown.
struct Verified {
  CheckedStore checked;
  std::vector<BadExtent> bad;
  double seconds = 0;
};

// Why a store is not whole, one reason a line; empty when it is, or when a run that is at it may be writing what is
// missing.
std::vector<std::string> damage_of(const StoreInfo& store);

std::vector<std::string> damage_of(const RunInfo& run);  // the same of all ranks' stores

std::string store_text(const StoreInfo& store);
std::string run_text(const RunInfo& run);
std::string bad_text(const BadExtent& bad);
std::string verified_text(const Verified& verified);
std::string store_json(const StoreInfo& store, const std::optional<Verified>& verified);
std::string run_json(const RunInfo& run, const std::optional<Verified>& verified);

}  // namespace spillway::store
