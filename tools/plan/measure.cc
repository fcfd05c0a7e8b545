#include "tools/plan/measure.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>

#include "kernels/devices.h"
#include "kernels/thread_shares.h"
#include "spillway/engine.h"
#include "spillway/error.h"
#include "src/engine/run_resources.h"
#include "src/plan/plan.h"
#include "tools/models/trainer.h"
#include "tools/terminal/heard.h"

namespace spillway::planning {
namespace {

// Both ways at once, reading, writing. The middle one of the rounds counts: others use the machine, too.
constexpr std::size_t kDriveRounds = 3, kDriveKinds = 3;
// The store that is probed: as many bytes in flight as a run has, which follow from its tiles; 400 MB of disk a second,
// since a short probe of little space measures a drive's cache, and a long one what is behind it; 8 GB at most.
constexpr std::uint64_t kLeastTile = 512 << 10, kMostTile = 4 << 20, kElements = 4 * kMostTile;
constexpr double kMostSpaceSeconds = 20;
constexpr double kMostFlops = 80e9;  // of a layer that is timed on the host device
constexpr std::uint32_t kMostVocabulary = 8192;
// The first one touches memory for the first time; more than the least while they take no time.
constexpr std::size_t kLeastSteps = 3, kMostSteps = 12;
constexpr double kStepSeconds = 0.5;

// Ctrl-C and its kin wait until what is measured has taken its files away; threads that start meanwhile inherit that.
class SignalsWait {
 public:
  SignalsWait() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~SignalsWait() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsWait(const SignalsWait&) = delete;
  SignalsWait& operator=(const SignalsWait&) = delete;

 private:
  sigset_t before_;
};

// Removed when it goes; what is open stays usable.
class TemporaryDirectories {
 public:
  explicit TemporaryDirectories(const std::vector<std::filesystem::path>& beside) {
    for (const auto& path : beside) {
      paths_.push_back(path / fmt::format(".spillway-plan-{}-{}", ::getpid(), paths_.size()));
    }
  }
  ~TemporaryDirectories() { remove(); }
  TemporaryDirectories(const TemporaryDirectories&) = delete;
  TemporaryDirectories& operator=(const TemporaryDirectories&) = delete;

  void remove() const {
    std::error_code ignored;
    for (const auto& path : paths_) std::filesystem::remove_all(path, ignored);
  }
  const std::vector<std::filesystem::path>& paths() const { return paths_; }

 private:
  std::vector<std::filesystem::path> paths_;
};

std::uint64_t write_extents(StoreThread& thread, const std::vector<Extent>& extents, std::span<std::byte> memory) {
  IoBatch batch(thread);
  std::uint64_t written = 0;
  for (const Extent& extent : extents) {
    written += extent.bytes;
    for (std::uint64_t at = 0; at < extent.bytes; at += kMiB) {
      const std::uint64_t bytes = std::min(kMiB, extent.bytes - at);
      batch.add({.op = IoOp::kWrite,
                 .file = kStripedSpace,
                 .offset = extent.offset + at,
                 .buffer = memory.data() + at % align_down(memory.size(), kMiB),
                 .bytes = bytes});
    }
    batch.wait();
  }
  return written;
}

MachineRates measure_links(const Config& config, DeviceKind device, const MeasureOptions& options,
                           std::vector<std::string>& facts) {
  const bool drives = options.drives;
  const double space = drives ? std::clamp(options.drive_seconds, 1.0, kMostSpaceSeconds) : 1;
  const auto elements = static_cast<std::uint64_t>(kElements * space);
  const std::uint64_t tile = std::clamp(config.tile_elements, kLeastTile, kMostTile);
  ModelDescription model;
  for (const char* name : {"a", "b"})
    model.blocks.push_back({.name = name, .parameters = {{.name = name, .shape = {elements / 2}}}});
  std::optional<SignalsWait> wait(std::in_place);
  const TemporaryDirectories directories(config.nvme_paths);
  Config probed;
  probed.device = device;
  probed.threads = config.threads;
  probed.weights = config.weights;
  probed.optimizer = config.optimizer;
  probed.tile_elements = tile;
  probed.io_block_bytes = config.io_block_bytes;
  probed.io_depth = config.io_depth;
  probed.io_engine = config.io_engine;
  probed.states = probed.parameters = drives ? Placement::kNvme : Placement::kHost;
  if (drives) probed.nvme_paths = directories.paths();
  probed.nvme_rates = config.nvme_rates;
  const terminal::Heard quiet;
  const std::vector<ThreadShare> shares = share_threads(config.threads);
  const Plan plan = make_plan(probed, model, static_cast<unsigned>(shares.size()));
  Agreement alone(nullptr);
  RunResources resources(probed, model, plan, {.on_existing = OnExisting::kReplace}, shares, alone);
  if (!drives) return resources.rates;
  directories.remove();
  wait.reset();
  ProbedExtents extents;
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
    for (std::size_t part = 0; part < kParts; ++part) {
      extents.read.push_back(resources.store->readable(t).extent[part]);
      extents.write.push_back(resources.store->writable(t).extent[part]);
    }
  }
  const std::span<std::byte> memory = resources.host_region(plan.host.buffers);
  // A drive answers at once for what was never written.
  std::uint64_t written = 0;
  for (const auto* side : {&extents.read, &extents.write}) written += write_extents(*resources.thread, *side, memory);
  const double seconds = options.drive_seconds / (kDriveRounds * kDriveKinds);
  std::array<MachineRates, kDriveRounds> rounds;
  ProbedBytes moved;
  for (MachineRates& round : rounds) {
    const ProbedBytes now = probe_extents(*resources.thread, extents, seconds, memory, round);
    moved.read += now.read;
    moved.written += now.written;
  }
  for (const auto rate :
       {&MachineRates::nvme_read, &MachineRates::nvme_write, &MachineRates::nvme_mixed, &MachineRates::sync_seconds}) {
    std::ranges::nth_element(rounds, rounds.begin() + kDriveRounds / 2, {}, rate);
    resources.rates.*rate = rounds[kDriveRounds / 2].*rate;
  }
  facts.push_back(fmt::format("the drive was timed for {:.1f} s: {} MiB read, {} MiB written", options.drive_seconds,
                              moved.read / kMiB, (moved.written + written) / kMiB));
  return resources.rates;
}

// Microseconds of every span of a name, in the order of their begin.
std::map<std::string, std::vector<double>> spans_of(const std::filesystem::path& trace) {
  std::ifstream file(trace);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  rapidjson::Document document;
  document.Parse(text.data(), text.size());
  std::map<std::string, std::vector<std::pair<double, double>>> found;
  if (!document.HasParseError() && document.IsObject() && document.HasMember("traceEvents")) {
    for (const auto& event : document["traceEvents"].GetArray()) {
      if (!event.HasMember("dur")) continue;
      found[event["name"].GetString()].emplace_back(event["ts"].GetDouble(), event["dur"].GetDouble());
    }
  }
  std::map<std::string, std::vector<double>> spans;
  for (auto& [name, times] : found) {
    std::ranges::sort(times);
    for (const auto& [begin, seconds] : times) spans[name].push_back(seconds);
  }
  return spans;
}

// The shortest of every `stride`th span, the first step left out.
double best_of(const std::vector<double>& spans, std::size_t first, std::size_t stride) {
  double best = 0;
  for (std::size_t i = stride + first; i < spans.size(); i += stride) {
    best = best == 0 ? spans[i] : std::min(best, spans[i]);
  }
  return best / 1e6;
}

// What is timed: the model's own sizes, less where a step would take too long.
struct Timed {
  models::ModelConfig model = {};
  Config config = {};
  std::uint32_t sequence = 0;
  bool smaller = false;
};
Timed timed_shape(const Config& config, const ModelShape& shape, DeviceKind device, std::uint32_t sequence) {
  Timed timed{.sequence = sequence};
  models::ModelConfig& model = timed.model;
  const double most = device_of(device).on_cpu ? kMostFlops : 40 * kMostFlops;
  std::uint32_t heads = shape.heads, micro_batch = config.micro_batch, inner = shape.inner;
  const auto flops = [&] {
    const double width = static_cast<double>(heads) * shape.head_width;
    return 6 * (4 * width * width + 2 * width * inner) * micro_batch * timed.sequence;
  };
  for (; flops() > most && micro_batch > 1; timed.smaller = true) micro_batch = (micro_batch + 1) / 2;
  for (; flops() > most && timed.sequence > 512; timed.smaller = true) timed.sequence /= 2;
  for (; flops() > most && heads > 1; timed.smaller = true) {
    heads = (heads + 1) / 2;
    inner = std::max(64u, inner / 2);
  }
  model.layers = 1;
  model.heads = heads;
  model.width = heads * shape.head_width;
  model.inner = inner;
  model.positions = timed.sequence;
  model.vocabulary = std::min(shape.vocabulary, kMostVocabulary);
  model.text = "{}";
  timed.config.device = device;
  timed.config.threads = config.threads;
  timed.config.weights = config.weights == DType::kFloat16 ? DType::kBFloat16 : config.weights;
  timed.config.micro_batch = micro_batch;
  timed.config.gradient_accumulation = std::min(config.gradient_accumulation, 2u);
  timed.config.sum_groups = 1;
  timed.config.gradient_clipping = 0;
  timed.config.optimizer.kind = OptimizerKind::kSgd;
  return timed;
}

ComputeRates measure_compute(Timed timed, DeviceKind device) {
  const models::TrainerOptions options = models::trainer_options(timed.config, device, timed.sequence);
  models::Trainer trainer(timed.model, options);
  const ModelDescription model = trainer.description();
  const TemporaryDirectories directories({std::filesystem::temp_directory_path()});
  std::filesystem::create_directories(directories.paths()[0]);
  const std::filesystem::path trace = directories.paths()[0] / "trace.json";
  const terminal::Heard quiet;
  {
    // Insides are kept where a budget has room for them.
    const std::uint64_t least = make_plan(timed.config, model).ledger.total(Placement::kHbm);
    timed.config.hbm_bytes = least + 3 * model.blocks.back().inside_bytes * model.micro_batches + kMiB;
    const auto engine = Engine::create(timed.config, model, {.trace = trace});
    engine->import_weights([](auto, auto, std::uint64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<float>((first + i) * 7919 % 1000) * 4e-5f - 0.02f;
    });
    trainer.attach(*engine);
    std::vector<std::uint32_t> rows(std::size_t{timed.config.micro_batch} * timed.config.gradient_accumulation *
                                    (timed.sequence + 1));
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint32_t>(i * 31 % timed.model.vocabulary);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t step = 0; step < kMostSteps; ++step) {
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (step >= kLeastSteps && taken.count() > kStepSeconds) break;
      trainer.run_step(rows);
      engine->step();
    }
  }
  const auto spans = spans_of(trace);
  for (const char* name : {"forward layer 0", "backward layer 0", "backward embedding"}) {
    if (spans.contains(name) && spans.at(name).size() >= kLeastSteps) continue;
    throw Error(Code::kIo, {.object = trace.string(),
                            .happened = "does not hold the timeline of what was timed",
                            .errno_value = 0,
                            .hint = "make room in TMPDIR, or give --device-rate"});
  }
  // Work of exactly this shape, by the same count as the model's.
  ModelShape shape =
      models::parse_shape(models::model_config_text(timed.model, timed.config.weights), "the timed model");
  const DescribedModel described = describe(shape, timed.config, {.device = device, .sequence = timed.sequence});
  const auto flops = [&](Work work) { return std::ranges::find(described.work, work, &VisitWork::work)->flops; };
  const auto rate = [](double work, double seconds) { return seconds > 0 ? work / seconds : 0; };
  const std::vector<double>& embedding = spans.at("backward embedding");
  ComputeRates rates;
  rates.forward = rate(flops(Work::kForward), best_of(spans.at("forward layer 0"), 0, 1));
  rates.backward = rate(flops(Work::kBackward), best_of(spans.at("backward layer 0"), 0, 1));
  rates.head = rate(flops(Work::kHead), best_of(embedding, 0, 2));
  rates.push_seconds = best_of(embedding, 1, 2) / described.work.back().pushed;
  return rates;
}

}  // namespace

MeasuredRates measure(const Config& config, const ModelShape& shape, DeviceKind device, const MeasureOptions& options) {
  MeasuredRates measured;
  measured.links = measure_links(config, device, options, measured.facts);
  if (!options.compute) return measured;
  const SignalsWait wait;
  const Timed timed = timed_shape(config, shape, device, options.sequence);
  measured.compute = measure_compute(timed, device);
  measured.facts.push_back(
      fmt::format("a layer of width {} and a head were timed, with {} rows of {} tokens{}", timed.model.width,
                  timed.config.micro_batch, timed.sequence,
                  timed.smaller ? ": smaller than the model's, so that compute is estimated" : ""));
  return measured;
}

}  // namespace spillway::planning
