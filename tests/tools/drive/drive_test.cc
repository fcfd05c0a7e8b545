// What is read from /proc and /sys, from copies made here; and what a SMART log says.
#include "tools/drive/drive.h"

#include <gtest/gtest.h>

#include <array>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tests/tools/drive/system_tree.h"
#include "tools/drive/endurance.h"

namespace spillway::drive {
namespace {

namespace fs = std::filesystem;

using DriveOfASystem = SystemTree;

TEST_F(DriveOfASystem, NvmeSaysModelLinkAndTemperature) {
  const fs::path pci = "devices/pci0000:00/0000:01:00.0", controller = pci / "nvme/nvme0",
                 block = controller / "nvme0n1";
  write(block / "size", "3907029168");
  write(block / "queue/logical_block_size", "512");
  write(block / "queue/max_sectors_kb", "128");
  write(block / "queue/scheduler", "[none] mq-deadline");
  write(block / "queue/write_cache", "write back");
  write(block / "queue/rotational", "0");
  write(block / "nvme0n1p2/partition", "2");
  link(block / "device", controller);
  write(controller / "model", "Fast Drive 2TB   ");
  write(controller / "firmware_rev", "1B2Q");
  write(controller / "hwmon3/temp1_input", "41850");
  write(controller / "hwmon3/temp1_max", "83850");
  link(controller / "device", pci);
  write(pci / "current_link_speed", "8.0 GT/s PCIe");
  write(pci / "current_link_width", "2");
  write(pci / "max_link_speed", "16.0 GT/s PCIe");
  write(pci / "max_link_width", "4");
  link("dev/block/259:2", block / "nvme0n1p2");

  const DriveInfo drive = drive_of(259, 2, root_);
  EXPECT_EQ(drive.name, "nvme0n1");
  EXPECT_EQ(drive.model, "Fast Drive 2TB");
  EXPECT_EQ(drive.firmware, "1B2Q");
  EXPECT_EQ(drive.scheduler, "none");
  EXPECT_EQ(drive.write_cache, "write back");
  EXPECT_EQ(drive.bytes, 3907029168ull * 512);
  EXPECT_EQ(drive.sector_bytes, 512u);
  EXPECT_EQ(drive.largest_request_bytes, 128 * kKiB);
  EXPECT_EQ(drive.rotational, false);
  EXPECT_EQ(drive.link_now, "8.0 GT/s × 2");
  EXPECT_EQ(drive.link_most, "16.0 GT/s × 4");
  EXPECT_DOUBLE_EQ(drive.celsius.value_or(0), 41.85);
  EXPECT_DOUBLE_EQ(drive.celsius_limit.value_or(0), 83.85);
  EXPECT_EQ(drive.pci, root_ / pci);
  EXPECT_FALSE(drive.is_virtual);
}

TEST_F(DriveOfASystem, DriveCountsWhatItMoves) {
  write("block/vda/stat",
        "  8690431 1092799 3000 17797071 7709770 1325405 1000 9906230 67 1440584 27829509 0 0 0 0 1 2");
  DriveInfo drive;
  EXPECT_FALSE(moved_bytes(drive, root_).has_value());
  drive.name = "vda";
  EXPECT_EQ(moved_bytes(drive, root_), 4000u * 512);
  drive.name = "vdb";
  EXPECT_FALSE(moved_bytes(drive, root_).has_value());
}

TEST_F(DriveOfASystem, RaidNamesItsParts) {
  write("devices/virtual/block/md0/size", "1000");
  write("devices/virtual/block/md0/md/level", "raid0");
  for (const char* part : {"nvme1n1", "nvme0n1"}) write(fs::path("devices/virtual/block/md0/slaves") / part, "");
  link("dev/block/9:0", "devices/virtual/block/md0");
  const DriveInfo drive = drive_of(9, 0, root_);
  EXPECT_EQ(drive.name, "md0");
  EXPECT_EQ(drive.model, "raid0");
  EXPECT_EQ(drive.parts, (std::vector<std::string>{"nvme0n1", "nvme1n1"}));
}

TEST_F(DriveOfASystem, DisksBelowCryptRaidAndPartitions) {
  for (const char* disk : {"nvme0n1", "nvme1n1"}) {
    const std::string name = disk, part = name + "p2";
    write("devices/" + name + "/" + part + "/partition", "2");
    link("class/block/" + name, "devices/" + name);
    link("class/block/" + part, "devices/" + name + "/" + part);
    link("devices/virtual/md0/slaves/" + part, "devices/" + name + "/" + part);
  }
  link("class/block/md0", "devices/virtual/md0");
  link("devices/virtual/dm-0/slaves/md0", "devices/virtual/md0");
  link("class/block/dm-0", "devices/virtual/dm-0");
  EXPECT_EQ(disks_below("dm-0", root_), (std::vector<std::string>{"nvme0n1", "nvme1n1"}));
  EXPECT_EQ(disks_below("nvme1n1p2", root_), std::vector<std::string>{"nvme1n1"});
  EXPECT_EQ(disks_below("sdz", root_), std::vector<std::string>{"sdz"});
}

TEST_F(DriveOfASystem, DeviceWithoutAnEntryHasNoName) { EXPECT_EQ(drive_of(7, 7, root_).name, ""); }

TEST_F(DriveOfASystem, MountOfAPathIsTheLastLongestOne) {
  fs::create_directories(root_ / "a b/c");
  const std::string root = root_.string();
  const std::string mountinfo =
      "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
      "30 22 0:40 / " +
      root +
      " rw - overlay overlay rw,lowerdir=x\n"
      "31 30 259:1 / " +
      root +
      "/a\\040b rw,noatime - xfs /dev/nvme0n1p1 rw,logbufs=8\n"
      "32 30 0:50 / " +
      root + "/a rw - tmpfs none rw\n";
  const MountInfo mount = mount_of(root_ / "a b/c", mountinfo);
  EXPECT_EQ(mount.type, "xfs");
  EXPECT_EQ(mount.source, "/dev/nvme0n1p1");
  EXPECT_EQ(mount.options, "rw,noatime,rw,logbufs=8");
  EXPECT_EQ(mount.major, 259u);
  EXPECT_EQ(mount.minor, 1u);
  EXPECT_EQ(mount.point, root_ / "a b");
  EXPECT_EQ(mount_of(root_, mountinfo).type, "overlay");
}

TEST_F(DriveOfASystem, MediaAreTold) {
  EXPECT_EQ(medium_of("ext4"), Medium::kDrive);
  EXPECT_EQ(medium_of("btrfs"), Medium::kDrive);
  EXPECT_EQ(medium_of("tmpfs"), Medium::kMemory);
  EXPECT_EQ(medium_of("overlay"), Medium::kOverlay);
  EXPECT_EQ(medium_of("nfs4"), Medium::kNetwork);
}

TEST_F(DriveOfASystem, SmartLogIsDecoded) {
  std::array<std::byte, 512> page{};
  page[1] = std::byte{0x3a};  // 314 K
  page[2] = std::byte{0x01};
  page[5] = std::byte{4};
  page[48] = std::byte{0x40};  // 1,000,000 units of 512,000 B
  page[49] = std::byte{0x42};
  page[50] = std::byte{0x0f};
  const Endurance drive = decode_smart_log(page);
  EXPECT_NEAR(drive.celsius, 40.85, 1e-9);
  EXPECT_EQ(drive.percent_used, 4u);
  EXPECT_DOUBLE_EQ(drive.written_bytes, 512e9);
  // 4 % in 0.512 TB: 128 GB are 1 %.
  EXPECT_NE(endurance_text({drive, ""}, 128e9).find("about 1.0000 %"), std::string::npos);
  EXPECT_NE(endurance_text({std::nullopt, "no NVMe"}, 1e9).find("does not tell"), std::string::npos);
}

}  // namespace
}  // namespace spillway::drive
