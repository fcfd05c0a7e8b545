// What handles of the engine's API for C stand for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/c/calls.h"
#include "spillway/c_api.h"
#include "spillway/c_ranks.h"
#include "spillway/communicator.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/offload_optimizer.h"
#include "src/comm/message_transport.h"
#include "src/engine/one_caller.h"
#include "src/engine/scratch_files.h"

namespace spillway::c {

inline DType dtype_of(spillway_dtype type) { return checked(type, DType::kFloat16, "spillway_dtype"); }

struct ConfigObject {
  Config config;
  std::string settings;
};

struct ModelObject {
  ModelDescription description;
  OneCaller caller;
};

struct CommunicatorObject {
  std::unique_ptr<Communicator> communicator;
  OneCaller caller;
};

struct EngineObject {
  ModelDescription description;
  std::shared_ptr<CommunicatorObject> ranks;     // null: this process alone. Outlives the engine
  std::unique_ptr<Engine> engine;                // null once it was destroyed
  std::vector<std::unique_ptr<Stream>> streams;  // given back inside the step that may still name them
  OneCaller caller;                              // outlives the engine
};

struct StreamObject {
  std::shared_ptr<EngineObject> of;
  std::unique_ptr<Stream> stream;
};

struct LeaseObject {
  std::shared_ptr<EngineObject> of;
  std::uint32_t block = 0;
  std::optional<Lease> lease;  // none once the engine was destroyed
};

struct ActivationObject {
  std::shared_ptr<EngineObject> of;
  std::optional<ActivationLease> lease;  // ditto
};

struct OptimizerObject {
  std::unique_ptr<TensorCarrier> carrier;  // null: none
  std::unique_ptr<OffloadOptimizer> optimizer;
  OptimizerKind kind = OptimizerKind::kAdam;
};

struct ScratchObject {
  std::unique_ptr<ScratchFiles> files;
  OneCaller caller;
};

// One table of each kind for the process, never taken apart: a program may give handles back while it exits. Kinds
// from 33 on are aio/c/io_tables.h's.
struct Tables {
  Handles<spillway_config, ConfigObject> configs{1, "spillway_config"};
  Handles<spillway_model, ModelObject> models{2, "spillway_model"};
  Handles<spillway_engine, EngineObject> engines{3, "spillway_engine"};
  Handles<spillway_stream, StreamObject> streams{4, "spillway_stream"};
  Handles<spillway_lease, LeaseObject> leases{5, "spillway_lease"};
  Handles<spillway_activation, ActivationObject> activations{6, "spillway_activation"};
  Handles<spillway_optimizer, OptimizerObject> optimizers{7, "spillway_optimizer"};
  Handles<spillway_scratch, ScratchObject> scratches{8, "spillway_scratch"};
  Handles<spillway_communicator, CommunicatorObject> communicators{9, "spillway_communicator"};
  Handles<spillway_message, Message> messages{10, "spillway_message"};
};
Tables& tables();

ExportOptions read_export_options(const spillway_export_options* options);
SaveOptions read_save_options(const spillway_save_options* options);

// An engine's export, on all of its ranks.
void export_of_ranks(Engine& engine, const EngineObject& object, const char* directory, const ExportOptions& options);

// What engine and optimizer tell alike.
inline std::size_t copy_blob(const std::vector<std::byte>& blob, void* out, std::size_t capacity) {
  const std::size_t bytes = out == nullptr ? 0 : std::min(capacity, blob.size());
  if (bytes > 0) std::memcpy(out, blob.data(), bytes);
  return blob.size();
}
inline void tell(const std::vector<std::string>& lines, void (*line)(void*, const char*), void* user) {
  given(line, "line");
  for (const std::string& text : lines) line(user, text.c_str());
}
inline void tell(const Ledger& ledger, void (*entry)(void*, spillway_tier, const char*, uint64_t), void* user) {
  given(entry, "entry");
  for (const Reservation& each : ledger.reservations) {
    entry(user, static_cast<spillway_tier>(each.tier), each.purpose.c_str(), each.bytes);
  }
}

// Of a function of the caller's.
inline void require(int returned) {
  if (returned != 0) {
    refuse("weights", "the caller's function failed with " + std::to_string(returned), "its own message says why");
  }
}

}  // namespace spillway::c
