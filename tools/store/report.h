// What `spillway store` says of a store, for people and as JSON.
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

std::string store_text(const StoreInfo& store);
std::string bad_text(const BadExtent& bad);
std::string verified_text(const Verified& verified);
std::string store_json(const StoreInfo& store, const std::optional<Verified>& verified);

}  // namespace spillway::store
