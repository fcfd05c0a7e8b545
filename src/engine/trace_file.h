// A run's timeline as a file in Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing show: a track
// for each link and thread, in lanes where its spans overlap; blocks and tiles by name. docs/timeline.md reads one. The
// spans are collected by swap/timeline.h; this file only names and writes them.
//
// Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include "src/plan/plan.h"
#include "swap/extents.h"
#include "swap/timeline.h"

namespace spillway {

class TraceFile {
 public:
  // Refuses a path that cannot be written (kIo). Plan and model must outlive it.
  TraceFile(std::filesystem::path path, const Plan& plan, const ModelDescription& model, std::size_t spans);
  ~TraceFile();  // a file that it made and never wrote goes
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  Timeline& timeline() noexcept { return timeline_; }
  // What it holds, and what for; one line.
  std::string describe() const;
  // When nothing records any more. `layout`: where tiles lie in the store; null without one. A failure, and spans that
  // found no room, are logged: the run is done whether it was traced or not.
  void write(const StoreLayout* layout) noexcept;

 private:
  void write_spans(const StoreLayout* layout);

  const std::filesystem::path path_;
  const Plan& plan_;
  const ModelDescription& model_;
  const std::size_t capacity_;
  Timeline timeline_;
  bool made_ = false, written_ = false;
};

}  // namespace spillway
