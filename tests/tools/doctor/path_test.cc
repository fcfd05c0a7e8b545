// What the doctor makes of facts about paths and of a probe's rates, and how it prints findings; no drive is asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "spillway/units.h"
#include "tools/doctor/checks.h"

namespace spillway::doctor {
namespace {

using testing::HasSubstr;

const Finding* find(const Findings& findings, const std::string& check) {
  const auto found = std::ranges::find(findings, check, &Finding::check);
  return found == findings.end() ? nullptr : &*found;
}

Finding of(const Findings& findings, const std::string& check) {
  if (const Finding* finding = find(findings, check)) return *finding;
  ADD_FAILURE() << "no finding of " << check;
  return {};
}

PathInfo healthy() {
  PathInfo facts;
  facts.path = facts.directory = "/mnt/nvme/spillway";
  facts.mount = {.type = "ext4", .source = "/dev/nvme0n1p1", .options = "rw,relatime", .point = "/mnt/nvme"};
  facts.drive.name = "nvme0n1";
  facts.drive.model = "Fast Drive 2TB";
  DiskInfo disk;
  disk.drive = facts.drive;
  disk.drive.link_now = disk.drive.link_most = disk.slot_most = "16.0 GT/s × 4";
  disk.drive.celsius = 41;
  disk.drive.celsius_limit = 84;
  facts.disks.push_back(disk);
  facts.total_bytes = 2000 * kGiB;
  facts.free_bytes = 500 * kGiB;
  facts.counts_space = true;
  facts.written = facts.intact = facts.direct = true;
  facts.alignment = 512;
  facts.engine = "io_uring";
  facts.no_probe = "left out";
  return facts;
}

TEST(DoctorPath, AHealthyPathIsFine) {
  const Findings findings = check_path(healthy(), {});
  EXPECT_EQ(worst_of(findings), Status::kOk);
  for (const Finding& finding : findings) EXPECT_EQ(finding.where, "/mnt/nvme/spillway");
  EXPECT_EQ(of(findings, "direct I/O").seen, "granted, in multiples of 512");
  EXPECT_EQ(of(findings, "probe").status, Status::kSkipped);
}

TEST(DoctorPath, WhatIsTakenAwayIsNamedWithItsRepair) {
  struct Case {
    const char* name;
    void (*take_away)(PathInfo&);
    const char* check;
    Status status;
    const char *seen, *repair;
  };
  const auto fail_with = [](PathInfo& f, int error) {
    f.written = f.intact = f.direct = false;
    f.engine = "";
    f.failed = ErrorParts{"x", "cannot be created", error, ""};
  };
  static const auto fail = fail_with;
  const Case cases[] = {
      {"not there",
       [](PathInfo& f) {
         f.directory.clear();
         fail(f, ENOENT);
       },
       "path", Status::kBroken, "No such file", "mkdir -p /mnt/nvme/spillway"},
      {"closed",
       [](PathInfo& f) {
         f.directory.clear();
         fail(f, EACCES);
       },
       "path", Status::kBroken, "Permission denied", "chown"},
      {"to be made where only another may",
       [](PathInfo& f) {
         f.directory = "/mnt";
         fail(f, EACCES);
       },
       "writing", Status::kBroken, "Permission denied",
       "sudo mkdir -p /mnt/nvme/spillway && sudo chown $USER /mnt/nvme/spillway"},
      {"read-only", [](PathInfo& f) { fail(f, EROFS); }, "writing", Status::kBroken, "Read-only",
       "remount,rw /mnt/nvme"},
      {"another's", [](PathInfo& f) { fail(f, EACCES); }, "writing", Status::kBroken, "Permission denied", "chown"},
      {"failing drive", [](PathInfo& f) { fail(f, EIO); }, "writing", Status::kBroken, "Input/output", "dmesg"},
      {"limit", [](PathInfo& f) { fail(f, EFBIG); }, "writing", Status::kBroken, "File too large", "ulimit -f"},
      {"a lie", [](PathInfo& f) { f.intact = false; }, "writing", Status::kBroken, "not what was written", "smartctl"},
      {"full",
       [](PathInfo& f) {
         f.written = false;
         f.failed = ErrorParts{"x", "cannot reserve", ENOSPC, ""};
         f.free_bytes = 0;
       },
       "space", Status::kBroken, "0 B free", "sudo du -xh --max-depth=2 /mnt/nvme"},
      {"over quota",
       [](PathInfo& f) {
         f.written = false;
         f.failed = ErrorParts{"x", "cannot reserve", EDQUOT, ""};
         f.quota_left = 0;
       },
       "space", Status::kBroken, "quota leaves 0 B", "setquota"},
      {"no direct I/O", [](PathInfo& f) { f.direct = false; }, "direct I/O", Status::kSlower, "grants none", "ext4"},
      {"zeros", [](PathInfo& f) { f.remarks = {"the file system cannot reserve space; writing"}; }, "reserving",
       Status::kSlower, "cannot reserve", "ext4"},
      {"cow", [](PathInfo& f) { f.remarks = {"copy-on-write could not be switched off"}; }, "copy-on-write",
       Status::kSlower, "cannot", "chattr +C"},
      {"slot of fewer lanes",
       [](PathInfo& f) {
         f.disks[0].drive.link_now = "8.0 GT/s × 4";
         f.disks[0].slot_most = "8.0 GT/s × 4";
       },
       "link", Status::kSlower, "8.0 GT/s", "another slot"},
      {"slot set low", [](PathInfo& f) { f.disks[0].drive.link_now = "16.0 GT/s × 2"; }, "link", Status::kSlower, "× 2",
       "reseat"},
      {"platters", [](PathInfo& f) { f.drive.rotational = true; }, "drive", Status::kSlower, "rotating", "SSD"},
      {"encrypted",
       [](PathInfo& f) {
         f.encrypted = true;
         f.drive.name = "dm-0";
       },
       "drive", Status::kSlower, "dm-crypt", "cryptsetup refresh"},
      {"worn out", [](PathInfo& f) { f.disks[0].percent_used = 104; }, "wear", Status::kSlower, "104 %", "another"},
      {"hot", [](PathInfo& f) { f.disks[0].drive.celsius = 84; }, "heat", Status::kSlower, "84 °C", "heat sink"},
      {"hanging", [](PathInfo& f) { f.hung = "write of 4096 bytes has made no progress"; }, "hanging", Status::kBroken,
       "no progress", "dmesg"},
      {"broken probe",
       [](PathInfo& f) {
         f.probe_failed = ErrorParts{"x", "write failed", EIO, ""};
       },
       "probe", Status::kBroken, "write failed (Input/output error)", "smartctl"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    PathInfo facts = healthy();
    c.take_away(facts);
    const Findings findings = check_path(facts, {});
    const Finding finding = of(findings, c.check);
    EXPECT_EQ(finding.status, c.status);
    EXPECT_THAT(finding.seen, HasSubstr(c.seen));
    EXPECT_THAT(finding.repair, HasSubstr(c.repair));
    EXPECT_EQ(finding.slower_by.empty(), c.status != Status::kSlower);
    EXPECT_EQ(worst_of(findings), c.status);  // and nothing else is worse for it
  }
}

TEST(DoctorPath, LinkSaysHowMuchIsLost) {
  PathInfo facts = healthy();
  facts.disks[0].drive.link_now = "8.0 GT/s × 2";
  EXPECT_EQ(of(check_path(facts, {}), "link").slower_by, "at most 2.0 instead of 7.9 GB/s");
  EXPECT_NEAR(link_gb_per_s("5.0 GT/s × 4").value_or(0), 2.0, 1e-9);
  EXPECT_FALSE(link_gb_per_s("").has_value());
  EXPECT_FALSE(link_gb_per_s("unknown").has_value());
}

TEST(DoctorPath, SpaceIsJudgedByTheStore) {
  PathInfo facts = healthy();
  RunRequirements required;
  required.paths = {facts.path};
  required.store_bytes = 500 * kGiB;
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kOk);
  *required.store_bytes += 1;
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kBroken);
  facts.store_bytes = 1;  // an old store makes room for the new one
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kOk);
  facts.quota_left = 10 * kGiB;
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kBroken);
}

TEST(DoctorPath, PathsShareAStore) {
  std::vector<PathInfo> paths = {healthy(), healthy()};
  paths[1].path = paths[1].directory = "/mnt/other";
  paths[1].disks[0].drive.name = "nvme1n1";
  paths[1].mount.minor = 1;
  RunRequirements required;
  required.paths = {paths[0].path, paths[1].path};
  required.store_bytes = 1000 * kGiB;
  EXPECT_EQ(of(check_paths(paths, required, {}), "space").status, Status::kOk);
  EXPECT_EQ(of(check_path(paths[0], required), "space").status, Status::kOk);  // alone it would not be
  *required.store_bytes += 1;
  EXPECT_EQ(of(check_paths(paths, required, {}), "space").status, Status::kBroken);
  EXPECT_EQ(find(check_paths(paths, required, {}), "paths"), nullptr);
  paths[1].disks[0].drive.name = "nvme0n1";
  EXPECT_THAT(of(check_paths(paths, required, {}), "paths").seen, HasSubstr("on the same drive, nvme0n1"));
  paths[1].mount.minor = 0;  // and in one file system, whose space is both paths'
  required.store_bytes = 500 * kGiB;
  EXPECT_EQ(of(check_paths(paths, required, {}), "space").status, Status::kOk);
  *required.store_bytes += 1;
  EXPECT_EQ(of(check_paths(paths, required, {}), "space").status, Status::kBroken);
  paths[1].store_bytes = 1;
  EXPECT_EQ(of(check_paths(paths, required, {}), "space").status, Status::kOk);
}

TEST(DoctorPath, EachOfSeveralRanksHasAStore) {
  PathInfo facts = healthy();
  RunRequirements required;
  required.paths = {facts.path};
  required.ranks = 4;
  required.store_bytes = 125 * kGiB;
  EXPECT_THAT(of(check_path(facts, required), "space").seen, HasSubstr("the stores of 4 ranks take 500 GiB"));
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kOk);
  *required.store_bytes += 1;
  EXPECT_EQ(of(check_path(facts, required), "space").status, Status::kBroken);
}

TEST(DoctorPath, DriveGpuAndThreadsBelongOnOneNode) {
  std::vector<PathInfo> paths = {healthy()};
  paths[0].disks[0].node = 0;
  EXPECT_EQ(find(check_paths(paths, {}, {.gpu = 0, .cpus = {0, 1}}), "numa"), nullptr);
  EXPECT_EQ(find(check_paths(paths, {}, {.gpu = {}, .cpus = {0}}), "numa"), nullptr);
  EXPECT_THAT(of(check_paths(paths, {}, {.gpu = 1, .cpus = {0, 1}}), "numa").seen, HasSubstr("the GPU on node 1"));
  EXPECT_THAT(of(check_paths(paths, {}, {.gpu = 0, .cpus = {1}}), "numa").repair, HasSubstr("--cpunodebind=0"));
}

TEST(DoctorPath, FileSystems) {
  struct Case {
    const char *type, *options;
    Status status;
    const char* seen;
  };
  const Case cases[] = {
      {"ext4", "rw,relatime", Status::kOk, "ext4"},
      {"ext4", "ro,relatime", Status::kBroken, "read-only"},
      {"ext4", "rw,errors=remount-ro", Status::kOk, "ext4"},  // an option that only begins or ends like one
      {"ext4", "rw,data=journal", Status::kSlower, "data=journal"},
      {"xfs", "rw,sync", Status::kSlower, "sync"},
      {"btrfs", "rw", Status::kOk, "copy-on-write is switched off"},
      {"tmpfs", "rw", Status::kBroken, "memory"},
      {"overlay", "rw", Status::kSlower, "container"},
      {"fuse.fuse-overlayfs", "rw", Status::kSlower, "container"},
      {"nfs4", "rw", Status::kSlower, "network"},
      {"9p", "rw", Status::kSlower, "Windows"},
      {"virtiofs", "rw", Status::kSlower, "host"},
      {"zfs", "rw", Status::kSlower, "copy-on-write"},
      {"vfat", "rw", Status::kBroken, "4 GiB"},
      {"fuseblk", "rw", Status::kSlower, "user space"},
      {"fuse.mergerfs", "rw", Status::kSlower, "user space"},
      {"", "", Status::kSkipped, "does not name"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.type) + " " + c.options);
    const Finding finding =
        judge_file_system({.type = c.type, .source = "/dev/x", .options = c.options, .point = "/{}"});
    EXPECT_EQ(finding.status, c.status);
    EXPECT_THAT(finding.seen, HasSubstr(c.seen));
    EXPECT_EQ(finding.repair.empty(), c.status == Status::kOk || c.status == Status::kSkipped);
  }
}

ProbeInfo steady() {
  ProbeInfo probe;
  probe.interval_seconds = 0.1;
  probe.rates.assign(40, 3e9);
  probe.written_bytes = 12'000'000'000;
  probe.write_rate = 3e9;
  probe.read_rate = 5e9;
  return probe;
}

TEST(DoctorPath, ARateThatHoldsIsFine) {
  ProbeInfo probe = steady();
  EXPECT_EQ(judge_probe(probe, {}, "/mnt").status, Status::kOk);
  for (std::size_t i = 30; i < 40; ++i) probe.rates[i] = 2.5e9;  // a fifth is a mood
  EXPECT_EQ(judge_probe(probe, {}, "/mnt").status, Status::kOk);
  probe.rates.clear();
  EXPECT_EQ(judge_probe(probe, {}, "/mnt").status, Status::kOk);
}

TEST(DoctorPath, ARateThatFallsIsMeasuredAndExplained) {
  ProbeInfo probe = steady();
  for (std::size_t i = 20; i < 40; ++i) probe.rates[i] = 6e8;
  drive::DriveInfo drive;
  Finding finding = judge_probe(probe, drive, "/mnt");
  EXPECT_EQ(finding.status, Status::kSlower);
  EXPECT_EQ(finding.slower_by, "3.00 GB/s in the first 0.8 s of writing, 0.60 in the last: 80 % less, from 5.6 GiB on");
  EXPECT_THAT(finding.repair, HasSubstr("fstrim -v /mnt"));
  drive.is_virtual = true;
  EXPECT_THAT(judge_probe(probe, drive, "/mnt").repair, HasSubstr("shared or throttled"));
  probe.celsius_before = 45;
  probe.celsius_after = 80;
  probe.celsius_limit = 84;
  finding = judge_probe(probe, drive, "/mnt");
  EXPECT_THAT(finding.repair, HasSubstr("heat sink"));
  EXPECT_THAT(finding.seen, HasSubstr("45 to 80 °C of 84"));
}

TEST(DoctorPath, HeatIsAWarningOfItsOwn) {
  ProbeInfo probe = steady();
  probe.celsius_after = 82;
  EXPECT_EQ(judge_probe(probe, {}, "/mnt").status, Status::kOk);  // of a drive that names no limit
  probe.celsius_limit = 84;
  EXPECT_EQ(judge_probe(probe, {}, "/mnt").status, Status::kSlower);
}

TEST(DoctorPath, AProbeLeavesMostOfTheSpaceAlone) {
  EXPECT_EQ(probe_bytes(0), 0u);
  EXPECT_EQ(probe_bytes(64 * kMiB - 1), 0u);
  EXPECT_EQ(probe_bytes(64 * kMiB), 16 * kMiB);
  EXPECT_EQ(probe_bytes(UINT64_MAX), 8 * kGiB);
  EXPECT_EQ(probe_bytes(UINT64_MAX, kGiB + 1), kGiB);
  EXPECT_EQ(probe_bytes(UINT64_MAX, 16 * kMiB - 1), 0u);
}

const Findings kSome = {{"", "kernel", Status::kOk, "Linux 6.1", "", ""},
                        {"", "io_uring", Status::kSlower, "EPERM", "50 % more CPU", "sysctl"},
                        {"/mnt/a", "path", Status::kSkipped, "not \"tried\"", "", ""}};

TEST(DoctorFinding, TheWorstDecides) {
  EXPECT_EQ(exit_code_of(worst_of({})), 0);
  EXPECT_EQ(exit_code_of(worst_of(std::span(kSome).first(1))), 0);
  EXPECT_EQ(exit_code_of(worst_of(std::span(kSome).last(1))), 0);
  EXPECT_EQ(exit_code_of(worst_of(kSome)), 3);
  Findings all = kSome;
  all.insert(all.begin(), {"", "memory", Status::kBroken, "little", "", "more"});
  EXPECT_EQ(exit_code_of(worst_of(all)), 4);
}

TEST(DoctorFinding, TextHasALineForEachAndItsRepairBelow) {
  EXPECT_EQ(findings_text(kSome, false),
            "ok       kernel           Linux 6.1\n"
            "slower   io_uring         EPERM: 50 % more CPU\n"
            "                          repair: sysctl\n"
            "\n/mnt/a\n"
            "skipped  path             not \"tried\"\n"
            "\n1 ok, 1 slower, 0 broken, 1 skipped\n");
  EXPECT_THAT(findings_text(kSome, true), HasSubstr("\x1b[33mslower   \x1b[0mio_uring"));
}

TEST(DoctorFinding, JsonHasTheSame) {
  const std::string json = findings_json(kSome);
  EXPECT_THAT(json, HasSubstr("\"status\": \"slower\",\n  \"exit_code\": 3"));
  EXPECT_THAT(json, HasSubstr("\"path\": \"/mnt/a\""));
  EXPECT_THAT(json, HasSubstr("not \\\"tried\\\""));
}

}  // namespace
}  // namespace spillway::doctor
