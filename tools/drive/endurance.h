// What a drive says about its own life: the NVMe SMART log, where this process may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tools/drive/drive.h"

namespace spillway::drive {

struct Endurance {
  unsigned percent_used = 0;  // of the life that the vendor rates the drive for; may exceed 100
  double written_bytes = 0;   // by hosts, since it was made
  double celsius = 0;
};

// The SMART / Health Information log page (NVM Express Base Specification 2.0, figure 207); 512 bytes.
Endurance decode_smart_log(std::span<const std::byte, 512> page);

// Asks the drive. Without an answer `why` says what stood in the way.
struct EnduranceAnswer {
  std::optional<Endurance> endurance;
  std::string why;
};
EnduranceAnswer read_endurance(const DriveInfo& drive);

// What writing `bytes` took of the drive's life, in words.
std::string endurance_text(const EnduranceAnswer& answer, double bytes);

}  // namespace spillway::drive
