// What the program's commands include, parsed once: CLI11 takes most of the time that a file of them takes. Never
// included by hand: a file includes what it uses, and compiles without this one (-Db_pch=false).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>
