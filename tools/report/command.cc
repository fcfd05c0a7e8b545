#include "tools/terminal/commands.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "tools/report/report.h"
#include "tools/terminal/number_option.h"
#include "tools/terminal/output.h"
#include "tools/terminal/tell.h"

namespace spillway::reporting {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostRuns = 8;  // there are so many colours
constexpr const char* kUsualPage = "report.html";

struct ReportOptions {
  std::vector<fs::path> files;
  std::vector<std::string> html;  // empty: no page; without a name: the usual one
  std::uint64_t drive_life = 0;
};

// `--html steps.jsonl` would write a page over the log that was to be read.
void refuse_what_is_no_page(const fs::path& file) {
  constexpr std::string_view kBegin = "<!doctype html>";
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored) || fs::file_size(file, ignored) == 0) return;
  std::string begin(kBegin.size(), '\0');
  std::ifstream(file, std::ios::binary).read(begin.data(), static_cast<std::streamsize>(begin.size()));
  if (begin == kBegin) return;
  throw Error(Code::kExists,
              {.object = file.string(),
               .happened = "exists and is no page, so --html does not write over it",
               .errno_value = 0,
               .hint = "name another file, after the logs: spillway report steps.jsonl --html page.html"});
}

int report(const ReportOptions& options, bool page_wanted) {
  if (options.files.size() > kMostRuns) {
    throw Error(Code::kInvalidArgument,
                {.object = "report",
                 .happened = fmt::format("{} runs are more than can be told apart", options.files.size()),
                 .errno_value = 0,
                 .hint = fmt::format("name at most {}", kMostRuns)});
  }
  // CLI11 gives an empty one where there was no name.
  const std::string named = options.html.empty() ? "" : options.html.front();
  const fs::path page = named.empty() ? kUsualPage : named;
  if (page_wanted && page != "-") {
    refuse_what_is_no_page(page);
    terminal::check_output("--html", page);
  }
  std::vector<Run> runs;
  for (const fs::path& file : options.files) runs.push_back(read_run(file));
  const auto life = static_cast<double>(options.drive_life);
  if (!page_wanted || page != "-") terminal::tell("{}", report_text(runs, life));
  std::fflush(stdout);
  if (page_wanted) terminal::write_output("--html", page, report_html(runs, life));
  return 0;
}

}  // namespace

void add_command(CLI::App& program, int& exit_code) {
  const auto kept = std::make_shared<ReportOptions>();
  ReportOptions& options = *kept;
  auto* command = program.add_subcommand(
      "report", "Say how a run went by its log: loss, step time, stalls, bytes, wear; several beside each other");
  command->add_option("files", options.files, "What finetune --log wrote, a file for each run")->required();
  auto* html = command->add_option("--html", options.html, "Write a page with charts there; default: report.html")
                   ->type_name("PATH")
                   ->expected(0, 1);
  command->add_option("--drive-life", options.drive_life, "What may be written to the drive in all, such as 1200TB")
      ->transform(terminal::as_size());
  command->footer(
      "Example:\n  spillway report steps.jsonl --html report.html\n  spillway report before.jsonl after.jsonl\n\n"
      "Exit code: 0 the report was made, 1 a file is no log or an option is wrong");
  command->callback([kept, html, &exit_code] { exit_code = report(*kept, html->count() > 0); });
}

}  // namespace spillway::reporting
