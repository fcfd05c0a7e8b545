// Communicators of the API for C, over the caller's table; and what an engine does on them.
#include "spillway/c_ranks.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/process_limits.h"
#include "kernels/thread_binding.h"
#include "spillway/communicator.h"
#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "spillway/export.h"
#include "spillway/gpu_ranks.h"
#include "spillway/store.h"
#include "src/c/c_handles.h"
#include "src/checkpoint/run_places.h"
#include "src/comm/agreement.h"
#include "src/comm/message_transport.h"
#include "src/comm/transport_communicator.h"
#include "swap/store_files.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_CHANNEL_DATA == static_cast<int>(Channel::kData));
static_assert(SPILLWAY_PARTING_LOST == static_cast<int>(Parting::kLost));

namespace {

std::vector<std::filesystem::path> paths_given(const char* const* paths, size_t count) {
  std::vector<std::filesystem::path> all;
  given(paths, "paths");
  for (size_t i = 0; i < count; ++i) all.emplace_back(given(paths[i], "paths"));
  return all;
}

// A message has its handle before it is started, since it may be over before the function returns.
template <typename Start>
void start(const char* what, Message message, Start&& begin) {
  spillway_message* const handle = tables().messages.add(std::make_shared<Message>(std::move(message)));
  if (const int failed = begin(handle); failed != 0) {
    spillway_message_over(handle, fmt::format("{} returned {}", what, failed).c_str());
  }
}

MessageFunctions functions_of(const spillway_transport& table) {
  MessageFunctions functions{.rank = table.rank,
                             .ranks = table.ranks,
                             .library = given(table.library, "spillway_transport.library"),
                             .send = {},
                             .receive = {},
                             .close = {}};
  given(table.send, "spillway_transport.send");
  given(table.receive, "spillway_transport.receive");
  if (table.rank >= table.ranks) {
    refuse("spillway_transport", fmt::format("rank {} of {} ranks", table.rank, table.ranks), "count ranks from 0");
  }
  functions.send = [table](std::uint32_t to, Channel channel, std::span<const std::byte> data, Message message) {
    start("send", std::move(message), [&](spillway_message* handle) {
      return table.send(table.user, to, static_cast<spillway_channel>(channel), data.data(), data.size(), handle);
    });
  };
  functions.receive = [table](std::uint32_t from, Channel channel, std::span<std::byte> data, Message message) {
    start("receive", std::move(message), [&](spillway_message* handle) {
      return table.receive(table.user, from, static_cast<spillway_channel>(channel), data.data(), data.size(), handle);
    });
  };
  if (table.close != nullptr) {
    functions.close = [table](Parting parting) { table.close(table.user, static_cast<spillway_parting>(parting)); };
  }
  return functions;
}

// Threads that the engine starts stay on this rank's part of the machine's cores, and the caller's thread does not.
std::unique_ptr<Engine> engine_on_its_cores(const Config& config, const ModelDescription& model,
                                            const EngineOptions& options) {
  if (options.communicator == nullptr) return Engine::create(config, model, options);
  const ThreadBinding caller{CpuMask(affinity_cpus())};
  share_host(*options.communicator);
  return Engine::create(config, model, options);
}

// One directory is for all ranks, and each has its store in a part of it.
std::vector<std::filesystem::path> stores_of_rank(const std::vector<std::filesystem::path>& paths,
                                                  const Communicator& ranks) {
  std::vector<std::filesystem::path> own;
  for (const std::filesystem::path& path : paths) own.push_back(directory_of_rank(path, ranks.rank()));
  return own;
}

void create_engine(std::shared_ptr<CommunicatorObject> ranks, const spillway_config* config,
                   const spillway_model* model, const spillway_options* options, spillway_engine** engine) {
  given(engine, "engine");
  const auto read = read_struct(options, "spillway_options");
  EngineOptions wanted;
  wanted.on_existing = checked(read.on_existing, OnExisting::kReplace, "spillway_on_existing");
  wanted.poison_released = read.poison_released != 0;
  if (read.snapshot != nullptr) wanted.snapshot = read.snapshot;
  if (read.trace != nullptr) wanted.trace = read.trace;
  if (read.trace_spans != 0) wanted.trace_spans = read.trace_spans;
  Config settings = tables().configs.find(config)->config;
  const auto described = tables().models.find(model);
  if (settings.lora.given()) {
    throw Error(Code::kUnsupported, {"spillway.lora", "is of spillway finetune, which makes the adapters", 0,
                                     "leave it out: a program of its own describes what it trains"});
  }
  const auto made = std::make_shared<EngineObject>();
  {
    const auto turn = described->caller.enter("spillway_engine_create");
    made->description = described->description;
  }
  made->ranks = std::move(ranks);
  // All ranks agree on much here, and nothing may come in between.
  std::optional<OneCaller::Turn> collective;
  if (made->ranks) collective.emplace(made->ranks->caller.enter("spillway_engine_create_on"));
  if (made->ranks && made->ranks->communicator->ranks() > 1) {
    wanted.communicator = made->ranks->communicator.get();
    agree_on_device(settings, *wanted.communicator);
    settings.nvme_paths = stores_of_rank(settings.nvme_paths, *wanted.communicator);
  }
  made->engine = engine_on_its_cores(settings, made->description, wanted);
  *engine = tables().engines.add(made);
}

}  // namespace

// The first rank writes, and all of them bring what they have: also where it cannot, since they do not know.
void spillway::c::export_of_ranks(Engine& engine, const EngineObject& object, const char* directory,
                                  const ExportOptions& options) {
  bool walked = false;
  const auto walk = [&](const WeightSink& sink) {
    walked = true;
    engine.export_weights(options.type == DType::kFloat32, sink);
  };
  const auto nowhere = [](auto, auto, auto, auto) {};
  Agreement ranks(object.ranks->communicator.get());
  ranks.all([&] {
    if (ranks.rank().index != 0) return walk(nowhere);
    try {
      export_model(object.description, directory, options, walk);
    } catch (...) {  // whatever it is, the others wait
      if (!walked) walk(nowhere);
      throw;
    }
  });
}

spillway_status spillway_message_over(spillway_message* message, const char* failure) {
  return guarded([&] {
    const auto taken = tables().messages.take(message);
    taken->over(failure == nullptr ? std::nullopt : std::optional<std::string>(failure));
  });
}

spillway_status spillway_communicator_create(const spillway_transport* transport,
                                             const spillway_communicator_options* options,
                                             spillway_communicator** communicator) {
  return guarded([&] {
    given(communicator, "communicator");
    const auto table = read_struct(given(transport, "spillway_transport"), "spillway_transport");
    const auto read = read_struct(options, "spillway_communicator_options");
    CommunicatorOptions wanted;
    if (read.patience_seconds != 0) wanted.patience_seconds = read.patience_seconds;
    refuse_patience(wanted.patience_seconds);
    if (read.scratch_bytes > 0) wanted.scratch_bytes = read.scratch_bytes;
    auto object = std::make_shared<CommunicatorObject>();
    object->communicator = std::make_unique<TransportCommunicator>(
        std::make_unique<MessageTransport>(functions_of(table)), TransferLimits{.scratch_bytes = wanted.scratch_bytes},
        wanted.patience_seconds);
    *communicator = tables().communicators.add(std::move(object));
  });
}

uint32_t spillway_communicator_rank(const spillway_communicator* communicator) {
  return answered(uint32_t{0}, [&] { return tables().communicators.find(communicator)->communicator->rank(); });
}

uint32_t spillway_communicator_ranks(const spillway_communicator* communicator) {
  return answered(uint32_t{0}, [&] { return tables().communicators.find(communicator)->communicator->ranks(); });
}

spillway_status spillway_communicator_broadcast(spillway_communicator* communicator, void* data, uint64_t bytes,
                                                uint32_t root) {
  return guarded([&] {
    const auto object = tables().communicators.find(communicator);
    const auto turn = object->caller.enter("spillway_communicator_broadcast");
    if (bytes > 0) given(data, "data");
    if (root >= object->communicator->ranks()) {
      refuse("spillway_communicator_broadcast", fmt::format("is of rank {}", root), "name one of the ranks");
    }
    Agreement(object->communicator.get()).broadcast({static_cast<std::byte*>(data), bytes}, root);
  });
}

spillway_status spillway_communicator_note_work(spillway_communicator* communicator) {
  return guarded([&] { tables().communicators.find(communicator)->communicator->note_work(); });
}

spillway_status spillway_communicator_note_ending(spillway_communicator* communicator, int ending) {
  return guarded([&] { tables().communicators.find(communicator)->communicator->note_ending(ending != 0); });
}

spillway_status spillway_communicator_destroy(spillway_communicator* communicator) {
  return guarded([&] {
    if (communicator == nullptr) return;
    const auto turn_of = tables().communicators.find(communicator);
    const auto turn = turn_of->caller.enter("spillway_communicator_destroy");
    tables().communicators.take(communicator);
  });
}

spillway_status spillway_engine_create(const spillway_config* config, const spillway_model* model,
                                       const spillway_options* options, spillway_engine** engine) {
  return guarded([&] {
    if (const auto groups = tables().configs.find(config)->config.sum_groups; groups > 1) {
      throw Error(Code::kUnsupported, {"spillway.sum_groups", fmt::format("is {}", groups), 0,
                                       "leave it out: a gradient does not say here which micro-batch it is of"});
    }
    create_engine(nullptr, config, model, options, engine);
  });
}

spillway_status spillway_engine_create_on(spillway_communicator* communicator, const spillway_config* config,
                                          const spillway_model* model, const spillway_options* options,
                                          spillway_engine** engine) {
  return guarded([&] {
    std::shared_ptr<CommunicatorObject> ranks;
    if (communicator != nullptr) ranks = tables().communicators.find(communicator);
    create_engine(std::move(ranks), config, model, options, engine);
  });
}

spillway_status spillway_roll_back_store(const char* const* paths, size_t count, uint64_t* step) {
  return guarded([&] {
    const std::uint64_t back = roll_back_store(paths_given(paths, count));
    if (step != nullptr) *step = back;
  });
}

spillway_status spillway_store_commits(const char* const* paths, size_t count,
                                       void (*commit)(void* user, uint64_t step, const void* blob, size_t blob_bytes),
                                       void* user) {
  return guarded([&] {
    given(commit, "commit");
    const StoreInfo info = inspect_store(paths_given(paths, count));
    if (info.step) commit(user, *info.step, info.blob.data(), info.blob.size());
    if (info.older_step) commit(user, *info.older_step, info.older_blob.data(), info.older_blob.size());
  });
}
