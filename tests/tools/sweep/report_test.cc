// What a sweep's findings look like for programs and for people.
#include "tools/sweep/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "spillway/config.h"
#include "spillway/units.h"

namespace spillway::sweep {
namespace {

using testing::HasSubstr;
using testing::Not;

SweepReport report(std::size_t paths) {
  SweepReport report;
  report.file_bytes = kGiB;
  report.setting = {512 * kKiB, 16};
  report.way = report.searched_way = {IoEngineKind::kIoUring, true};
  report.ways = {{report.way, ""}, {{IoEngineKind::kLibaio, false}, "EAGAIN (all of fs.aio-max-nr is taken)"}};
  report.measured_path = paths > 1 ? kAllPaths : 0;
  for (std::uint32_t path = 0; path < paths; ++path) {
    PathInfo facts;
    facts.path = "/mnt/<nvme" + std::to_string(path) + ">";
    facts.direct = true;
    report.paths.push_back(facts);
    report.shares.push_back(path + 1);
    report.measurements[{report.setting, Work::kMixed, report.way, path}] = {{(path + 1) * 2e9, 0.005, 100, 200}};
  }
  for (const Setting& setting : {Setting{512 * kKiB, 16}, Setting{kMiB, 32}}) {
    report.candidates.push_back({setting, {1, 1, 1}, 0.005});
    report.measurements[report.searched(setting, Work::kMixed)] = {
        {5.2e9, 0.005, 1000, 2000}, {5e9, 0.005, 1000, 2000}, {5.4e9, 0.005, 1000, 2000}};
  }
  report.choice = {.chosen = 0, .fastest = 1, .share = 0.99};
  return report;
}

TEST(SweepReport, JsonHoldsWhatBothLoadersReadInTheirTypes) {
  const std::string json = report_json(report(1));
  EXPECT_THAT(json, HasSubstr("\"block_size\": 524288"));
  EXPECT_THAT(json, HasSubstr("\"queue_depth\": 16"));
  EXPECT_THAT(json, HasSubstr("\"intra_op_parallelism\": 1"));
  EXPECT_THAT(json, HasSubstr("\"single_submit\": false"));
  EXPECT_THAT(json, HasSubstr("\"overlap_events\": true"));
  EXPECT_THAT(json, HasSubstr("\"use_gds\": false"));
  EXPECT_THAT(json, HasSubstr("\"io_engine\": \"io_uring\""));
  EXPECT_THAT(json, Not(HasSubstr("nvme_paths")));
}

TEST(SweepReport, OurLoaderReadsTheJsonBack) {
  std::string json = report_json(report(1));
  json.insert(json.find('{') + 1, "\"train_batch_size\": 1,");
  const Config config = config_from_json(json, "fragment");
  EXPECT_EQ(config.io_block_bytes, 512 * kKiB);
  EXPECT_EQ(config.io_depth, 16u);
  EXPECT_EQ(config.io_engine, IoEngineKind::kIoUring);
}

TEST(SweepReport, SeveralPathsComeWithTheirRates) {
  SweepReport both = report(2);
  EXPECT_THAT(report_json(both),
              HasSubstr("\"nvme_paths\": [\n      \"/mnt/<nvme0>\",\n      \"/mnt/<nvme1>\"\n    ]"));
  EXPECT_THAT(report_json(both), HasSubstr("\"nvme_rates\": [\n      2.0,\n      4.0\n    ]"));
  EXPECT_THAT(report_text(both, false), HasSubstr("all, striped"));
  both.shares[0] = 0;  // too slow to take part
  EXPECT_THAT(report_json(both), HasSubstr("\"nvme_paths\": [\n      \"/mnt/<nvme1>\"\n    ]"));
}

TEST(SweepReport, DrivesTakeTheSharesOfTheirPaths) {
  const SweepReport one = report(1);
  ASSERT_EQ(shares_of_drives(one).size(), 1u);
  EXPECT_EQ(shares_of_drives(one)[0].share, 1);
  SweepReport four = report(4);
  four.shares = {48, 0, 12, 4};
  for (std::size_t path = 0; path < 4; ++path) four.paths[path].drive.name = path == 3 ? "nvme0n1" : "";
  four.paths[0].drive.name = "nvme0n1";
  const std::vector<DriveShare> drives = shares_of_drives(four);
  ASSERT_EQ(drives.size(), 2u);
  EXPECT_EQ(drives[0].facts.path, four.paths[0].path);
  EXPECT_EQ(drives[0].share, 52.0 / 64);
  EXPECT_EQ(drives[1].facts.path, four.paths[2].path);
  EXPECT_EQ(drives[1].share, 12.0 / 64);
}

TEST(SweepReport, StepTakesTheDrivesBytesAtTheMixedRate) {
  SweepReport one = report(1);
  one.parameters = 7e9;
  EXPECT_NEAR(step_seconds(one), 7e9 * 26 / 5.2e9, 1e-9);
  EXPECT_THAT(report_text(one, false), HasSubstr("35.0 s a step"));
}

TEST(SweepReport, TextIsPlainWithoutColours) {
  const std::string text = report_text(report(1), false);
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  EXPECT_THAT(text, HasSubstr("[5.20]"));
  EXPECT_THAT(text, HasSubstr("EAGAIN (all of fs.aio-max-nr is taken)"));
  EXPECT_THAT(text, HasSubstr("99.0 % of the fastest, 1 MiB × 32"));
  EXPECT_THAT(report_text(report(1), true), HasSubstr("\x1b[48;5;"));
}

TEST(SweepReport, FioCommandAsksForTheSame) {
  EXPECT_THAT(fio_command(report(1)),
              HasSubstr("--rwmixread=54 --bs=512k --iodepth=16 --ioengine=io_uring --direct=1"));
}

TEST(SweepReport, PageIsSelfContainedAndEscaped) {
  SweepReport one = report(1);
  one.sustained =
      drive::Sustained{.interval_seconds = 1, .rates = {2e9, 2e9, 1e9}, .written_bytes = 5 * kGiB, .seconds = 3};
  const std::string page = report_html(one);
  EXPECT_THAT(page, Not(HasSubstr("http")));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("<nvme0>")));
  EXPECT_THAT(page, HasSubstr("&lt;nvme0&gt;"));
  EXPECT_THAT(page, HasSubstr("class='marked'"));
}

}  // namespace
}  // namespace spillway::sweep
