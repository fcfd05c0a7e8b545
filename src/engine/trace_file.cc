#include "src/engine/trace_file.h"

#include <fmt/format.h>
#include <rapidjson/ostreamwrapper.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <span>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/stall.h"
#include "spillway/units.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

enum Track : std::size_t {
  kSteps,
  kCalls,
  kWaits,
  kUpdates,
  kCommits,
  kCompute,
  kUp,
  kDown,
  kChecksums,
  kReads,
  kWrites,
  kTracks
};
constexpr const char* kTrackNames[kTracks] = {"steps",        "caller: calls", "caller: waits", "update",
                                              "commit",       "compute",       "h2d",           "d2h",
                                              "store thread", "nvme read",     "nvme write"};
// Requests in flight need lanes by the dozen, so the two NVMe tracks are groups of their own, which a viewer can fold.
std::uint64_t group_of(std::size_t track) { return track == kReads ? 2 : track == kWrites ? 3 : 1; }
std::uint64_t thread_of(std::size_t track, std::size_t lane) {
  return (group_of(track) == 1 ? (track + 1) * 100 : group_of(track) * 10'000) + lane;
}

Track track_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::kStep: return kSteps;
    case SpanKind::kAcquire:
    case SpanKind::kFinishStep: return kCalls;
    case SpanKind::kWait: return kWaits;
    case SpanKind::kUpdate: return kUpdates;
    case SpanKind::kCommit: return kCommits;
    case SpanKind::kForward:
    case SpanKind::kBackward: return kCompute;
    case SpanKind::kCopyUp:
    case SpanKind::kAccumulatorUp: return kUp;
    case SpanKind::kCopyDown:
    case SpanKind::kGradientDown:
    case SpanKind::kAccumulatorDown: return kDown;
    case SpanKind::kRead: return kReads;
    case SpanKind::kWrite:
    case SpanKind::kSync: return kWrites;
    case SpanKind::kChecksum: return kChecksums;
  }
  return kSteps;
}

// Spans that a step is expected to leave: each visit (its call, a wait, its work), each tile's update, requests and
// copies, and the chunks in which its weights come for a backward visit.
std::uint64_t spans_per_step(const Plan& plan) {
  std::uint64_t spans = 4 + 3 * plan.visits.size() + plan.blocks.size();
  for (const TilePlace& tile : plan.tile_places) {
    constexpr std::size_t kWeights = index_of(Part::kWeights);
    spans += tile.shape.trainable ? 3 : 0;
    for (Part part : {Part::kWeights, Part::kStates}) spans += written_by_update(tile, part) ? 2 : 0;
    if (plan.host.chunk_bytes > 0 && !plan.hbm.places.empty() && tile.home[kWeights] == Placement::kNvme)
      spans += 3 * div_up(extent_bytes(tile.shape, Part::kWeights), plan.host.chunk_bytes);
  }
  for (const Visit& visit : plan.visits) {  // up and down again
    if (visit.pass == Pass::kBackward && plan.blocks[visit.block].accumulator_home) spans += 2;
  }
  return spans;
}

// What a trace begins with, from whatever version: a file that does not is not ours to replace.
constexpr std::string_view kBeginning = R"({"displayTimeUnit")";

bool is_something_else(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0) return false;
  std::string beginning(kBeginning.size(), '\0');
  std::ifstream(path).read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  return beginning != kBeginning;
}

// Whose bytes lie where in the store.
class StoreNames {
 public:
  StoreNames(const StoreLayout* layout, std::span<const std::string> tiles) : layout_(layout), tiles_(tiles) {
    if (!layout) return;
    for (std::uint32_t t = 0; t < layout->tiles.size(); ++t) {
      for (const auto& slot : layout->tiles[t].extent) {
        for (std::size_t part = 0; part < kParts; ++part) {
          if (slot[part].bytes > 0)
            extents_.push_back({slot[part].offset, slot[part].offset + slot[part].bytes, t, part});
        }
      }
    }
    std::ranges::sort(extents_, {}, &TileExtent::begin);
  }

  std::string at(std::uint64_t offset) const {
    const auto behind = std::ranges::upper_bound(extents_, offset, {}, &TileExtent::begin);
    if (behind != extents_.begin() && offset < std::prev(behind)->end) {
      const TileExtent& place = *std::prev(behind);
      return fmt::format("{} of {}", place.part == index_of(Part::kWeights) ? "weights" : "states", tiles_[place.tile]);
    }
    return layout_ && offset >= layout_->scratch_offset ? "scratch" : "manifest record";
  }

 private:
  struct TileExtent {
    std::uint64_t begin = 0, end = 0;
    std::uint32_t tile = 0;
    std::size_t part = 0;
  };
  const StoreLayout* layout_;
  std::span<const std::string> tiles_;
  std::vector<TileExtent> extents_;
};

// Spans of one track that overlap lie in lanes: each goes to the first lane that is free when it begins.
class Lanes {
 public:
  std::size_t place(const Span& span) {
    const auto free = std::ranges::find_if(ends_, [&](std::int64_t end) { return end <= span.begin_ns; });
    const auto lane = static_cast<std::size_t>(free - ends_.begin());
    if (free == ends_.end()) ends_.push_back(0);
    ends_[lane] = span.end_ns;
    return lane;
  }
  std::size_t count() const { return ends_.size(); }

 private:
  std::vector<std::int64_t> ends_;
};

class Events {
 public:
  explicit Events(std::ostream& out) : stream_(out), json_(stream_) {
    json_.StartObject();
    text("displayTimeUnit", "ms");
    json_.Key("traceEvents");
    json_.StartArray();
    name_of("process_name", group_of(kSteps), 0, "spillway");
    for (std::size_t track : {kReads, kWrites}) name_of("process_name", group_of(track), 0, kTrackNames[track]);
  }

  void span(std::size_t track, std::size_t lane, const std::string& name, const Span& span) {
    json_.StartObject();
    text("ph", "X");
    text("name", name);
    number("pid", group_of(track));
    number("tid", thread_of(track, lane));
    microseconds("ts", span.begin_ns);
    microseconds("dur", span.end_ns - span.begin_ns);
    if (span.bytes > 0) {
      json_.Key("args");
      json_.StartObject();
      number("bytes", span.bytes);
      json_.EndObject();
    }
    json_.EndObject();
  }

  void lane(std::size_t track, std::size_t lane, std::size_t lanes) {
    const std::uint64_t thread = thread_of(track, lane);
    name_of("thread_name", group_of(track), thread,
            lanes == 1 ? std::string(kTrackNames[track]) : fmt::format("{} {}", kTrackNames[track], lane + 1));
    about("thread_sort_index", group_of(track), thread);
    number("sort_index", thread);
    json_.EndObject();
    json_.EndObject();
  }

  void finish(std::uint64_t lost) {
    json_.EndArray();
    json_.Key("otherData");
    json_.StartObject();
    number("lost_spans", lost);
    json_.EndObject();
    json_.EndObject();
  }

 private:
  void text(const char* key, const std::string& value) {
    json_.Key(key);
    json_.String(value);
  }
  void number(const char* key, std::uint64_t value) {
    json_.Key(key);
    json_.Uint64(value);
  }
  // Exactly, to the nanosecond.
  void microseconds(const char* key, std::int64_t ns) {
    json_.Key(key);
    const std::string value = fmt::format("{}.{:03}", ns / 1000, ns % 1000);
    json_.RawValue(value.c_str(), value.size(), rapidjson::kNumberType);
  }
  // Opens an event about a process or thread, and its arguments.
  void about(const char* what, std::uint64_t group, std::uint64_t thread) {
    json_.StartObject();
    text("ph", "M");
    text("name", what);
    number("pid", group);
    number("tid", thread);
    json_.Key("args");
    json_.StartObject();
  }
  void name_of(const char* what, std::uint64_t group, std::uint64_t thread, const std::string& name) {
    about(what, group, thread);
    text("name", name);
    json_.EndObject();
    json_.EndObject();
  }

  rapidjson::OStreamWrapper stream_;
  rapidjson::Writer<rapidjson::OStreamWrapper> json_;
};

std::string name_of(const Span& span, const ModelDescription& model, std::span<const std::string> tiles,
                    const StoreNames& store) {
  const auto block = [&] { return model.blocks[span.subject].name; };
  switch (span.kind) {
    case SpanKind::kStep: return fmt::format("step {}", span.subject);
    case SpanKind::kAcquire: return "acquire " + block();
    case SpanKind::kFinishStep: return fmt::format("step() of step {}", span.subject);
    case SpanKind::kCommit: return fmt::format("commit of step {}", span.subject);
    case SpanKind::kWait: return kStallNames[span.subject];
    case SpanKind::kForward: return "forward " + block();
    case SpanKind::kBackward: return "backward " + block();
    case SpanKind::kGradientDown: return "gradient of " + block();
    case SpanKind::kAccumulatorUp:
    case SpanKind::kAccumulatorDown: return "accumulated gradient of " + block();
    case SpanKind::kUpdate:
    case SpanKind::kCopyUp:
    case SpanKind::kCopyDown:
    case SpanKind::kChecksum: return tiles[span.subject];
    case SpanKind::kRead:
    case SpanKind::kWrite: return store.at(span.subject);
    case SpanKind::kSync: return "sync";
  }
  return {};
}

}  // namespace

TraceFile::TraceFile(std::filesystem::path path, const Plan& plan, const ModelDescription& model, std::size_t spans)
    : path_(std::move(path)),
      plan_(plan),
      model_(model),
      capacity_(std::max<std::size_t>(spans, 1)),
      timeline_(capacity_, std::max(plan.blocks.size(), plan.hbm.places.size())) {
  // Refused when the run begins: at its end there is nobody to ask.
  if (is_something_else(path_)) {
    throw Error(Code::kExists, {path_.string(), "is there, and is no trace, so it is not replaced", 0,
                                "name another file for the trace"});
  }
  std::error_code ignored;
  made_ = !std::filesystem::exists(path_, ignored);
  // What is there is replaced when there is something to write in its place.
  if (!std::ofstream(path_, std::ios::app)) {
    made_ = false;
    throw Error(Code::kIo,
                {path_.string(), "cannot be opened for the trace", errno, "name a file that this user may write"});
  }
}

TraceFile::~TraceFile() {
  std::error_code ignored;
  if (made_ && !written_) std::filesystem::remove(path_, ignored);
}

std::string TraceFile::describe() const {
  return fmt::format("trace: {}, its last {} spans, about {} steps; {:.1f} MiB of memory of its own", path_.string(),
                     capacity_, std::max<std::uint64_t>(capacity_ / spans_per_step(plan_), 1),
                     static_cast<double>(capacity_ * sizeof(Span)) / static_cast<double>(kMiB));
}

void TraceFile::write(const StoreLayout* layout) noexcept {
  written_ = true;
  try {
    write_spans(layout);
    const std::uint64_t lost = timeline_.lost();
    log(LogLevel::kInfo,
        fmt::format("{}: the run's timeline, for ui.perfetto.dev or chrome://tracing", path_.string()));
    if (lost == 0) return;
    log(LogLevel::kWarning,
        fmt::format("{}: holds the newest {} spans, the {} before them are lost", path_.string(), capacity_, lost));
  } catch (const std::exception& failure) {
    // The run itself is over and well: a trace that cannot be written is no error of it.
    log(LogLevel::kWarning, failure.what());
  }
}

void TraceFile::write_spans(const StoreLayout* layout) {
  std::vector<std::string> tiles;
  for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) tiles.push_back(tile_name(plan_, model_, t));
  // Requests were recorded by their offset alone: names are looked up here, when the run is over.
  const StoreNames store(layout, tiles);
  std::ofstream out(path_, std::ios::trunc);
  Events events(out);
  Lanes lanes[kTracks];
  for (const Span& span : timeline_.spans()) {
    const Track track = track_of(span.kind);
    events.span(track, lanes[track].place(span), name_of(span, model_, tiles, store), span);
  }
  for (std::size_t track = 0; track < kTracks; ++track) {
    for (std::size_t lane = 0; lane < lanes[track].count(); ++lane) events.lane(track, lane, lanes[track].count());
  }
  events.finish(timeline_.lost());
  out.flush();
  if (!out) fail_file(path_, "the trace cannot be written", errno);
}

}  // namespace spillway
