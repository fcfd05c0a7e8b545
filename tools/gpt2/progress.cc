#include "tools/gpt2/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace spillway::gpt2 {

// No C++ package of Debian 12 draws a progress bar; this is all that one line needs.
Progress::Progress(std::uint64_t first, std::uint64_t last)
    : terminal_(::isatty(STDOUT_FILENO) == 1),
      first_(first),
      last_(last),
      step_(first),
      start_(std::chrono::steady_clock::now()) {}

void Progress::line(std::string_view text) {
  clear();
  fmt::print("{}\n", text);
  if (terminal_) draw(step_);
  std::fflush(stdout);
}

void Progress::done(std::uint64_t step) {
  step_ = step;
  if (terminal_) draw(step);
}

void Progress::clear() {
  if (terminal_) fmt::print("\r\x1b[K");
}

void Progress::draw(std::uint64_t step) {
  constexpr std::uint64_t kCells = 30;
  const std::uint64_t total = last_ - first_, done = step - first_;
  const std::uint64_t filled = total == 0 ? kCells : done * kCells / total;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::string left = "--:--";
  if (done > 0) {
    const auto rest =
        static_cast<std::uint64_t>(seconds / static_cast<double>(done) * static_cast<double>(total - done));
    left = rest >= 3600 ? fmt::format("{}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60)
                        : fmt::format("{:02}:{:02}", rest / 60, rest % 60);
  }
  fmt::print("\r\x1b[K[{:#<{}}{:.<{}}] {}/{}  {} left", "", filled, "", kCells - filled, step, last_, left);
  std::fflush(stdout);
}

}  // namespace spillway::gpt2
