// A log of steps, as a whole; what is accepted is reported in both ways.
#include "tests/fuzz/targets.h"
#include "tools/report/report.h"

namespace spillway::fuzz {

void step_log(Bytes input) {
  const auto path = scratch_file("steps.jsonl", input);
  accepted([&] {
    const reporting::Run run = reporting::read_run(path);
    SPILLWAY_CHECK(!run.steps.empty(), "a log has a step");
    for (std::size_t i = 1; i < run.steps.size(); ++i) {
      SPILLWAY_CHECK(run.steps[i - 1].step < run.steps[i].step, "steps are in order, each once");
    }
    for (const double life : {0.0, 6e14}) {
      const std::string text = reporting::report_text({run, run}, life), page = reporting::report_html({run}, life);
      SPILLWAY_CHECK(!text.empty() && page.starts_with("<!doctype html>"), "there is something to say of it");
    }
    return 0;
  });
}

}  // namespace spillway::fuzz
