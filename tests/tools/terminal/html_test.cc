#include "tools/terminal/html.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string_view>

namespace spillway::terminal {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::size_t count_of(std::string_view text, std::string_view what) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != text.npos; at += what.size()) ++count;
  return count;
}

TEST(Html, TextIsEscapedWhereverItStands) {
  EXPECT_EQ(escaped("<a href=\"x\" b='y'>&"), "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
  const std::string name = "<nvme0>";
  for (const std::string& text :
       {page_begin(name), card(name, "what"), card("value", name), text_at(0, 0, "end", name),
        heat_map_svg({.title = name, .columns = {"a"}, .rows = {"b"}, .cells = {1.0}}),
        heat_map_svg({.title = "t", .columns = {name}, .rows = {"b"}, .cells = {1.0}}),
        heat_map_svg({.title = "t", .columns = {"a"}, .rows = {name}, .cells = {1.0}}), line_chart_svg({.title = name}),
        line_chart_svg({.x_name = name}), line_chart_svg({.y_name = name}),
        line_chart_svg({.series = {{.name = name, .x = {1}, .y = {1}}}})}) {
    EXPECT_THAT(text, Not(HasSubstr(name)));
    EXPECT_THAT(text, HasSubstr("&lt;nvme0&gt;"));
  }
}

TEST(Html, HeatMapShowsEachCellAndMarksOne) {
  const std::string svg = heat_map_svg(
      {.title = "t", .columns = {"a", "b"}, .rows = {"1", "2"}, .cells = {1.0, 2.5, std::nullopt, 1.0}, .marked = 1});
  for (const char* value : {">1.00<", ">2.50<"}) EXPECT_THAT(svg, HasSubstr(value));
  EXPECT_EQ(count_of(svg, "class='empty'"), 1u);
  EXPECT_EQ(count_of(svg, "class='marked'"), 1u);
  EXPECT_LT(svg.find("class='marked'"), svg.find(">2.50<"));
  EXPECT_GT(svg.find("class='marked'"), svg.find(">1.00<"));
  // Equal cells have one colour, the best another.
  const auto colour_before = [&](std::size_t at) {
    const std::size_t fill = svg.rfind("fill='rgb", at);
    return svg.substr(fill, svg.find(')', fill) - fill);
  };
  const std::size_t first = svg.find(">1.00<"), best = svg.find(">2.50<"), last = svg.rfind(">1.00<");
  EXPECT_EQ(colour_before(first), colour_before(last));
  EXPECT_NE(colour_before(first), colour_before(best));
}

TEST(Html, ChartsOfLittleHaveNoGap) {
  EXPECT_THAT(heat_map_svg({.title = "t", .columns = {"a"}, .rows = {"b"}, .cells = {1.0}}), HasSubstr("1.00"));
  EXPECT_THAT(line_chart_svg({.title = "none"}), Not(HasSubstr("nan")));
}

TEST(Html, LineChartLeavesOutWhatALogarithmHasNoPlaceFor) {
  LineChart chart{.series = {{.name = "a", .x = {1, 2, 3}, .y = {10, 0, 100}, .dashed = true, .colour = 9}}};
  const auto points = [&] {
    const std::string svg = line_chart_svg(chart);
    const std::size_t from = svg.find("points='");
    return count_of(svg.substr(from, svg.find('\'', from + 8) - from), ",");
  };
  EXPECT_EQ(points(), 3u);
  chart.log_y = true;
  EXPECT_EQ(points(), 2u);
  EXPECT_THAT(line_chart_svg(chart), HasSubstr("class='series s1 dashed'"));
  EXPECT_EQ(count_of(line_chart_svg(chart), "class='mark'"), 0u);
  chart.mark_x = 2;
  EXPECT_EQ(count_of(line_chart_svg(chart), "class='mark'"), 1u);
}

TEST(Html, AnAxisBeginsAtZeroOrBelowWhatItShows) {
  LineChart chart{.series = {{.x = {1, 2}, .y = {100, 101}}}};
  EXPECT_THAT(line_chart_svg(chart), HasSubstr(">0</text>"));
  EXPECT_THAT(line_chart_svg(chart), Not(HasSubstr(">100.4</text>")));
  chart.from_zero = false;
  EXPECT_THAT(line_chart_svg(chart), HasSubstr(">100.4</text>"));
  EXPECT_THAT(line_chart_svg({.from_zero = false, .series = {{.x = {1}, .y = {5}}}}), Not(HasSubstr("nan")));
  EXPECT_THAT(line_chart_svg({.from_zero = false, .series = {{.x = {1}, .y = {0}}}}), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace spillway::terminal
