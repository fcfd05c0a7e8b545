// The timeline of a run: what is recorded where, that nothing is lost without being counted, and that tracing changes
// no bit.
#include "swap/timeline.h"
#include "kernels/host_device.h"

#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/workers.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/plan/plan.h"
#include "tests/kernels/gate.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;
using testing::toy_config;
using testing::ToyTrainer;

constexpr std::uint32_t kMicroBatches = 2;
constexpr DType kType = DType::kBFloat16;

const ModelDescription& model() {
  static const ModelDescription description = testing::toy_model(5, 3000, kMicroBatches);
  return description;
}

struct Event {
  std::string track, name;
  int thread = 0;
  std::int64_t begin_ns = 0, end_ns = 0;
  std::uint64_t bytes = 0;
};

struct Trace {
  explicit Trace(const std::filesystem::path& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    rapidjson::Document json;
    json.Parse(text.str().c_str());
    EXPECT_FALSE(json.HasParseError()) << "at " << json.GetErrorOffset();
    if (json.HasParseError()) return;
    lost = json["otherData"]["lost_spans"].GetUint64();
    std::map<int, std::string> threads;
    for (const auto& event : json["traceEvents"].GetArray()) {
      if (std::string(event["name"].GetString()) == "thread_name")
        threads[event["tid"].GetInt()] = event["args"]["name"].GetString();
    }
    for (const auto& event : json["traceEvents"].GetArray()) {
      if (std::string(event["ph"].GetString()) != "X") continue;
      Event span;
      span.name = event["name"].GetString();
      span.thread = event["tid"].GetInt();
      span.track = threads.at(span.thread);
      const std::size_t digits = span.track.find_last_not_of("0123456789");
      if (digits + 1 < span.track.size()) span.track.resize(digits);  // `nvme read 3` is a lane of `nvme read`
      span.begin_ns = std::llround(event["ts"].GetDouble() * 1000);
      span.end_ns = span.begin_ns + std::llround(event["dur"].GetDouble() * 1000);
      if (event.HasMember("args")) span.bytes = event["args"]["bytes"].GetUint64();
      events.push_back(span);
    }
  }

  // Those of a track that began in step `step`, in order.
  std::vector<Event> in_step(std::uint64_t step, const std::string& track) const {
    const std::string name = "step " + std::to_string(step);
    const auto whole =
        std::ranges::find_if(events, [&](const Event& e) { return e.track == "steps" && e.name == name; });
    EXPECT_NE(whole, events.end()) << name;
    std::vector<Event> found;
    for (const Event& event : events) {
      if (event.track == track && event.begin_ns >= whole->begin_ns && event.begin_ns < whole->end_ns)
        found.push_back(event);
    }
    return found;
  }

  std::vector<Event> events;
  std::uint64_t lost = 0;
};

std::uint64_t bytes_of(const std::vector<Event>& events) {
  std::uint64_t sum = 0;
  for (const Event& event : events) sum += event.bytes;
  return sum;
}

std::map<std::string, int> count_by_name(const std::vector<Event>& events) {
  std::map<std::string, int> counts;
  for (const Event& event : events) ++counts[event.name];
  return counts;
}

struct Training {
  std::vector<StepReport> reports;
  std::vector<std::uint32_t> bits;
};

Training run(const Config& config, const EngineOptions& options, int steps) {
  auto engine = Engine::create(config, model(), options);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model(), config.weights, kMicroBatches};
  Training run;
  for (int s = 0; s < steps; ++s) run.reports.push_back(trainer.run_step());
  run.bits = testing::exported(*engine);
  return run;
}

class TimelineTest : public ::testing::Test {
 protected:
  Config config(Placement parameters = Placement::kNvme, Placement states = Placement::kNvme) const {
    return toy_config(parameters, states, kType, store_.path() / "store");
  }
  std::filesystem::path file() const { return store_.path() / "trace.json"; }

  TempStore store_;
};

TEST_F(TimelineTest, SpansOfOneLaneDoNotOverlap) {
  run(config(), {.trace = file()}, 4);
  const Trace trace(file());
  EXPECT_EQ(trace.lost, 0u);
  std::map<int, std::int64_t> end;
  std::set<std::string> tracks;
  std::int64_t last = 0;
  for (const Event& event : trace.events) {
    EXPECT_GE(event.begin_ns, last) << "in order of their begin";
    EXPECT_GE(event.begin_ns, end[event.thread]) << event.track << ", " << event.name;
    EXPECT_GE(event.end_ns, event.begin_ns) << event.track << ", " << event.name;
    end[event.thread] = event.end_ns;
    last = event.begin_ns;
    tracks.insert(event.track);
  }
  for (const char* track : {"steps", "caller: calls", "caller: waits", "update", "commit", "compute", "h2d", "d2h",
                            "nvme read", "nvme write", "store thread"}) {
    EXPECT_TRUE(tracks.contains(track)) << track;
  }
}

TEST_F(TimelineTest, EveryVisitOfEveryStepHasASpanInTheOrderOfTheVisits) {
  std::vector<std::string> visits, calls;
  for (const Visit& visit : model().visits) {
    const std::string& block = model().blocks[visit.block].name;
    visits.push_back((visit.pass == Pass::kForward ? "forward " : "backward ") + block);
    calls.push_back("acquire " + block);
  }
  for (Placement placement : {Placement::kNvme, Placement::kHost, Placement::kHbm}) {
    run(config(placement, placement), {.on_existing = OnExisting::kReplace, .trace = file()}, 4);
    const Trace trace(file());
    for (std::uint64_t step = 1; step <= 4; ++step) {
      std::vector<std::string> names, called;
      for (const Event& event : trace.in_step(step, "compute")) names.push_back(event.name);
      for (const Event& event : trace.in_step(step, "caller: calls")) called.push_back(event.name);
      EXPECT_EQ(names, visits) << "step " << step;
      ASSERT_FALSE(called.empty());
      EXPECT_EQ(called.back(), "step() of step " + std::to_string(step));
      called.pop_back();
      EXPECT_EQ(called, calls) << "step " << step;
    }
  }
}

// An update is made in the next step's forward pass, so a step from the second on has all of one.
TEST_F(TimelineTest, EveryTileIsReadUpdatedAndWrittenOnceAStepAndTheBytesAreTheReports) {
  constexpr std::uint64_t kSteps = 6;
  const Plan plan = make_plan(config(), model());
  std::set<std::string> tiles;
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) tiles.insert(tile_name(plan, model(), t));
  ASSERT_EQ(tiles.size(), plan.tiles.size());

  const Training traced = run(config(), {.trace = file()}, kSteps);
  const Trace trace(file());
  std::int64_t read_beyond_reports = 0;
  for (std::uint64_t step = 2; step <= kSteps; ++step) {
    const auto reads = trace.in_step(step, "nvme read"), writes = trace.in_step(step, "nvme write");
    auto read = count_by_name(reads), written = count_by_name(writes);
    auto updated = count_by_name(trace.in_step(step, "update"));
    EXPECT_EQ(updated.size(), tiles.size());
    for (const std::string& tile : tiles) {
      EXPECT_EQ(updated[tile], 1) << tile;
      EXPECT_EQ(read["states of " + tile], 1) << tile;
      EXPECT_GE(read["weights of " + tile], 1) << tile;
      EXPECT_EQ(written["states of " + tile], 1) << tile;
      EXPECT_EQ(written["weights of " + tile], 1) << tile;
    }
    EXPECT_EQ(read.size(), 2 * tiles.size()) << "nothing else is read";
    EXPECT_EQ(written["manifest record"], 2);
    EXPECT_EQ(written["sync"], 2);
    const StepReport& report = traced.reports[step - 1];
    EXPECT_EQ(bytes_of(writes), report.nvme_write_bytes);
    EXPECT_EQ(bytes_of(trace.in_step(step, "h2d")), report.h2d_bytes);
    EXPECT_EQ(bytes_of(trace.in_step(step, "d2h")), report.d2h_bytes);
    read_beyond_reports +=
        static_cast<std::int64_t>(bytes_of(reads)) - static_cast<std::int64_t>(report.nvme_read_bytes);
  }
  // A report counts what has arrived, and a step ends while the first tiles of its update are on their way.
  EXPECT_LE(std::abs(read_beyond_reports), static_cast<std::int64_t>(plan.host.buffers.bytes));
}

TEST_F(TimelineTest, TracingChangesNoBit) {
  for (Placement placement : {Placement::kNvme, Placement::kHbm}) {
    Config untraced = config(placement, placement);
    if (!untraced.nvme_paths.empty()) untraced.nvme_paths = {store_.path() / "other"};
    const Training without = run(untraced, {.on_existing = OnExisting::kReplace}, 3);
    const Training with = run(config(placement, placement), {.on_existing = OnExisting::kReplace, .trace = file()}, 3);
    EXPECT_EQ(with.bits, without.bits);
  }
}

TEST_F(TimelineTest, AFullRingKeepsTheNewestAndCountsTheOthers) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  run(config(), {.trace = file()}, 3);
  const std::size_t all = Trace(file()).events.size();
  run(config(), {.on_existing = OnExisting::kReplace, .trace = file(), .trace_spans = 64}, 3);
  set_log_sink({});
  const Trace trace(file());
  EXPECT_EQ(trace.events.size(), 64u);
  EXPECT_GT(trace.lost, 0u);
  EXPECT_GT(all, 64u);
  const std::string told = "the " + std::to_string(trace.lost) + " before them are lost";
  EXPECT_TRUE(std::ranges::any_of(lines, [&](const std::string& line) { return line.ends_with(told); })) << told;
}

TEST_F(TimelineTest, ARunThatEndsWithAnErrorLeavesItsTrace) {
  {
    auto engine = Engine::create(config(), model(), {.trace = file()});
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model(), kType, kMicroBatches};
    trainer.poison_step = 2;
    trainer.run_step();
    EXPECT_THROW(trainer.run_step(), Error);
  }
  const Trace trace(file());
  EXPECT_EQ(trace.in_step(1, "compute").size(), model().visits.size());
  EXPECT_EQ(count_by_name(trace.events)["step() of step 2"], 1);
}

TEST_F(TimelineTest, APathThatCannotBeWrittenIsRefusedBeforeThereIsAStore) {
  for (const std::filesystem::path& path : {store_.path(), store_.path() / "none" / "trace.json"}) {
    try {
      Engine::create(config(), model(), {.trace = path});
      ADD_FAILURE() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kIo);
      EXPECT_EQ(error.parts().object, path.string());
      EXPECT_NE(error.parts().errno_value, 0);
    }
    EXPECT_FALSE(std::filesystem::exists(store_.path() / "store"));
  }
}

TEST_F(TimelineTest, ARunThatIsRefusedLeavesNoTraceAndAnotherOnesAlone) {
  run(config(), {}, 1);
  EXPECT_THROW(Engine::create(config(), model(), {.trace = file()}), Error) << "the store exists";
  EXPECT_FALSE(std::filesystem::exists(file()));
  std::ofstream(file()) << "an older run's";
  EXPECT_THROW(Engine::create(config(), model(), {.trace = file()}), Error);
  std::string kept;
  std::getline(std::ifstream(file()), kept);
  EXPECT_EQ(kept, "an older run's");
}

TEST(Timeline, KeepsTheNewestInOrderOfTheirBegin) {
  Timeline timeline(3, 1);
  for (std::int64_t begin : {50, 40, 10, 30, 20}) {
    timeline.add({.subject = static_cast<std::uint64_t>(begin), .begin_ns = begin, .end_ns = begin + 5});
  }
  std::vector<std::uint64_t> kept;
  for (const Span& span : timeline.spans()) kept.push_back(span.subject);
  EXPECT_EQ(kept, (std::vector<std::uint64_t>{10, 20, 30}));
  EXPECT_EQ(timeline.lost(), 2u);
}

TEST(Timeline, AStreamsSpanLastsAsLongAsItsWorkAndMoreSpansThanMarksAreCounted) {
  const auto workers = create_workers(1);
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers);
  const auto stream = device->create_stream("a");
  const auto other = device->create_stream("b");
  Timeline timeline(4096, 1);
  timeline.attach(*device);
  {
    const StreamSpan span(&timeline, {.kind = SpanKind::kCopyUp, .subject = 7, .bytes = 9}, *stream);
    stream->launch([&timeline](HostWorkers&) { timeline.add({.subject = 1, .begin_ns = timeline.now_ns()}); });
  }
  stream->synchronize();
  { const StreamSpan span(&timeline, {.subject = 8}, *stream); }  // which sees what has ended
  stream->synchronize();
  timeline.detach();
  const auto spans = timeline.spans();
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].subject, 7u);
  EXPECT_EQ(spans[0].bytes, 9u);
  EXPECT_LE(spans[0].begin_ns, spans[1].begin_ns);
  EXPECT_GE(spans[0].end_ns, spans[1].begin_ns);

  Timeline full(4096, 1);
  full.attach(*device);
  std::vector<Timeline::Mark*> marks;
  for (int i = 0; i < 2000; ++i) marks.push_back(full.begin({.kind = SpanKind::kCopyUp}, i % 2 ? *other : *stream));
  for (Timeline::Mark* mark : marks) full.end(mark);
  EXPECT_GT(full.lost(), 0u);
  stream->synchronize();
  other->synchronize();
  Timeline::Mark* const late = full.begin({.kind = SpanKind::kCopyUp}, *stream);
  EXPECT_NE(late, nullptr) << "marks come back";
  full.end(late);
  stream->synchronize();
  full.detach();
  EXPECT_EQ(full.spans().size() + full.lost(), 2001u);
}

TEST(Timeline, AStreamThatIsBehindDelaysNoOthersSpans) {
  const auto workers = create_workers(1);
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers);
  const auto slow = device->create_stream("slow"), quick = device->create_stream("quick");
  Timeline timeline(8192, 1);
  timeline.attach(*device);
  Gate gate;
  {
    const StreamSpan span(&timeline, {.subject = 1}, *slow);
    gate.enqueue(*device, *slow);
  }
  for (int i = 0; i < 4000; ++i) {
    { const StreamSpan span(&timeline, {.subject = 2}, *quick); }
    if (i % 100 == 0) quick->synchronize();
  }
  EXPECT_EQ(timeline.lost(), 0u);
  gate.open();
  slow->synchronize();
  quick->synchronize();
  timeline.detach();
  EXPECT_EQ(timeline.spans().size(), 4001u);
}

}  // namespace
}  // namespace spillway
