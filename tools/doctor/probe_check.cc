#include "tools/doctor/checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/drive/sustained.h"
#include "tools/terminal/amount.h"

namespace spillway::doctor {
namespace {

using terminal::gb_per_s;
using terminal::text_of_size;

constexpr double kHolds = 0.8;    // of the first second's rate; drives and their neighbours breathe by less
constexpr double kNearLimit = 5;  // °C below the temperature from which a drive slows down

std::string heat_text(const ProbeInfo& probe) {
  if (!probe.celsius_after) return "";
  std::string text = probe.celsius_before
                         ? fmt::format(", {:.0f} to {:.0f} °C", *probe.celsius_before, *probe.celsius_after)
                         : fmt::format(", {:.0f} °C", *probe.celsius_after);
  if (probe.celsius_limit) text += fmt::format(" of {:.0f}", *probe.celsius_limit);
  return text;
}

bool hot(const ProbeInfo& probe) {
  return probe.celsius_after && probe.celsius_limit && *probe.celsius_after >= *probe.celsius_limit - kNearLimit;
}

}  // namespace

Finding judge_probe(const ProbeInfo& probe, const drive::DriveInfo& drive, const std::string& mount_point) {
  const Ends ends = ends_of(probe);
  Finding finding;
  finding.seen = fmt::format("{} written at {:.2f} GB/s, then read at {:.2f} GB/s{}", text_of_size(probe.written_bytes),
                             gb_per_s(probe.write_rate), gb_per_s(probe.read_rate), heat_text(probe));
  if (ends.last < kHolds * ends.first) {
    finding.status = Status::kSlower;
    finding.slower_by =
        fmt::format("{:.2f} GB/s in the first {:.1f} s of writing, {:.2f} in the last: {:.0f} % less",
                    gb_per_s(ends.first), ends.seconds, gb_per_s(ends.last), 100 * (1 - ends.last / ends.first));
    if (const auto drop = drive::find_drop(probe.rates)) {
      double before = 0;
      for (std::size_t i = 0; i < drop->at; ++i) before += probe.rates[i] * probe.interval_seconds;
      finding.slower_by += fmt::format(", from {} on", text_of_size(static_cast<std::uint64_t>(before)));
    }
    if (hot(probe)) {
      finding.repair = "the drive slows down to cool: a heat sink, or air over it";
    } else if (drive.is_virtual) {
      finding.repair = "a virtual drive, shared or throttled by its host; probe again to see whether it stays so";
    } else {
      finding.repair = fmt::format(
          "sudo fstrim -v {}   # and free a fifth of the drive: its fast cache is full; spillway sweep --sustained 200 "
          "shows how large it is",
          mount_point);
    }
  } else if (hot(probe)) {
    finding.status = Status::kSlower;
    finding.slower_by = "a few seconds more and the drive slows down to cool";
    finding.repair = "a heat sink, or air over it";
  }
  return finding;
}

}  // namespace spillway::doctor
