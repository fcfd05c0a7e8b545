// What `spillway report` shows of runs: a table, and a page with the same table and charts.
#pragma once

#include <string>
#include <vector>

#include "tools/report/steps.h"

namespace spillway::reporting {

std::string report_text(const std::vector<Run>& runs, double drive_life);
// One file that needs no network.
std::string report_html(const std::vector<Run>& runs, double drive_life);

}  // namespace spillway::reporting
