#include "tools/drive/endurance.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <system_error>

namespace spillway::drive {
namespace {

// Where the fields of the log page begin.
constexpr std::size_t kTemperature = 1, kPercentageUsed = 5, kDataUnitsWritten = 48;
constexpr double kDataUnit = 512'000;  // "in thousands of 512 byte units"
constexpr double kKelvin = 273.15;

}  // namespace

Endurance decode_smart_log(std::span<const std::byte, 512> page) {
  const auto at = [&](std::size_t offset) { return std::to_integer<unsigned>(page[offset]); };
  Endurance endurance;
  endurance.celsius = at(kTemperature) + 256.0 * at(kTemperature + 1) - kKelvin;
  endurance.percent_used = at(kPercentageUsed);
  for (std::size_t byte = 0; byte < 16; ++byte) {
    endurance.written_bytes += std::ldexp(at(kDataUnitsWritten + byte), static_cast<int>(8 * byte)) * kDataUnit;
  }
  return endurance;
}

EnduranceAnswer read_endurance(const DriveInfo& drive) {
  if (!drive.name.starts_with("nvme")) return {{}, "only NVMe drives are asked"};
  const std::string device = "/dev/" + drive.name;
  const int fd = ::open(device.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {{}, fmt::format("{}: {}", device, std::generic_category().message(errno))};
  std::array<std::byte, 512> page{};
  struct nvme_admin_cmd command {};
  command.opcode = 0x02;  // get log page
  command.nsid = 0xffffffff;
  command.addr = reinterpret_cast<std::uintptr_t>(page.data());
  command.data_len = page.size();
  command.cdw10 = 0x02 | ((page.size() / 4 - 1) << 16);  // the SMART log; number of dwords, less one
  const int result = ::ioctl(fd, NVME_IOCTL_ADMIN_CMD, &command);
  const int error = errno;
  ::close(fd);
  if (result < 0) return {{}, fmt::format("{}: {}", device, std::generic_category().message(error))};
  if (result > 0) return {{}, fmt::format("{}: NVMe status {:#x}", device, static_cast<unsigned>(result))};
  return {decode_smart_log(page), ""};
}

std::string endurance_text(const EnduranceAnswer& answer, double bytes) {
  const double terabytes = bytes / 1e12;
  if (!answer.endurance) {
    return fmt::format("the drive does not tell what {:.3f} TB written are of its life ({})", terabytes, answer.why);
  }
  const Endurance& drive = *answer.endurance;
  if (drive.percent_used == 0 || drive.written_bytes <= 0) {
    return fmt::format("{:.3f} TB written; the drive has used less than 1 % of its rated life in {:.1f} TB", terabytes,
                       drive.written_bytes / 1e12);
  }
  // The drive counts whole percents, so its life so far gives the rest only roughly.
  const double life = drive.written_bytes / drive.percent_used * 100;
  return fmt::format("{:.3f} TB written, about {:.4f} % of the drive's life: it has used {} % of it in {:.1f} TB",
                     terabytes, bytes / life * 100, drive.percent_used, drive.written_bytes / 1e12);
}

}  // namespace spillway::drive
