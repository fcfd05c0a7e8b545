#include "tools/terminal/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "tools/terminal/tell.h"

namespace spillway::terminal {

// No C++ package of Debian 12 draws a progress bar; this is all that one line needs.
Progress::Progress(std::uint64_t first, std::uint64_t last, std::FILE* out, bool may_draw)
    : out_(out),
      terminal_(may_draw && ::isatty(::fileno(out)) == 1),
      first_(first),
      last_(last),
      step_(first),
      start_(std::chrono::steady_clock::now()) {}

void Progress::line(std::string_view text) {
  clear();
  tell(out_, "{}\n", text);
  if (terminal_ && last_ > first_) draw_step();
  std::fflush(out_);
}

void Progress::done(std::uint64_t step) {
  step_ = step;
  if (terminal_) draw_step();
}

void Progress::at(double share, double seconds_left, std::string_view what) {
  if (terminal_) draw(share, "", seconds_left, what);
}

void Progress::clear() {
  if (terminal_) write(out_, "\r\x1b[K");
}

void Progress::draw_step() {
  const std::uint64_t total = last_ - first_, done = step_ - first_;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double left = done == 0 ? -1 : seconds / static_cast<double>(done) * static_cast<double>(total - done);
  const double share = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
  draw(share, fmt::format(" {}/{}", step_, last_), left, "");
}

void Progress::draw(double share, std::string_view middle, double seconds_left, std::string_view what) {
  constexpr std::size_t kCells = 30;
  const auto filled = static_cast<std::size_t>(std::clamp(share, 0.0, 1.0) * kCells);
  std::string left = "--:--";
  if (seconds_left >= 0) {
    const auto rest = static_cast<std::uint64_t>(seconds_left);
    left = rest >= 3600 ? fmt::format("{}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60)
                        : fmt::format("{:02}:{:02}", rest / 60, rest % 60);
  }
  write(out_, "\r\x1b[K");
  tell(out_, "[{:#<{}}{:.<{}}]{}  {} left{}{}", "", filled, "", kCells - filled, middle, left, what.empty() ? "" : "  ",
       what);
  std::fflush(out_);
}

}  // namespace spillway::terminal
