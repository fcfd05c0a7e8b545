#include "src/engine/visit_cursor.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

const std::vector<Visit> kVisits = {
    {0, Pass::kForward}, {1, Pass::kForward}, {0, Pass::kBackward}, {1, Pass::kBackward}, {0, Pass::kBackward}};

VisitCursor begun(std::vector<Visit> visits = kVisits) {
  VisitCursor cursor(std::move(visits), true);
  cursor.begin_step();
  return cursor;
}

TEST(VisitCursor, PlannedVisitsComeInOrder) {
  VisitCursor cursor = begun();
  for (int step = 0; step < 2; ++step) {
    for (std::size_t v = 0; v < kVisits.size(); ++v) {
      EXPECT_FALSE(cursor.last());
      EXPECT_EQ(cursor.advance(kVisits[v].block, kVisits[v].pass), v);
    }
    EXPECT_TRUE(cursor.last());
    cursor.begin_step();
  }
  EXPECT_EQ(cursor.unplanned(), 0u);
}

TEST(VisitCursor, AVisitLeftOutIsSkipped) {
  VisitCursor cursor = begun();
  EXPECT_EQ(cursor.advance(1, Pass::kForward), 1u);
  EXPECT_EQ(cursor.unplanned(), 1u);
  EXPECT_EQ(cursor.advance(0, Pass::kBackward), 2u);
  EXPECT_EQ(cursor.unplanned(), 1u);
}

TEST(VisitCursor, TheFirstVisitOutOfTurnBeginsAgain) {
  const auto count = [](VisitCursor cursor, std::initializer_list<Visit> visits) {
    int begun = 0;
    for (const Visit& visit : visits) {
      begun += cursor.begins_again(visit);
      cursor.advance(visit.block, visit.pass);
    }
    return begun;
  };
  const std::vector<Visit> visits = {
      {0, Pass::kForward}, {1, Pass::kForward}, {0, Pass::kForward}, {1, Pass::kBackward}};
  EXPECT_EQ(count(VisitCursor(visits, false), {visits[0], visits[1], visits[2], visits[3]}), 0);
  EXPECT_EQ(count(VisitCursor(visits, false), {visits[0], visits[0]}), 1) << "in the middle";
  EXPECT_EQ(count(VisitCursor(visits, false), {visits[0], visits[1], visits[2], visits[0]}), 1) << "after the pass";
  EXPECT_EQ(count(VisitCursor(visits, false), {visits[0], visits[1], visits[2], visits[3], visits[0]}), 1);
  EXPECT_EQ(count(VisitCursor(visits, true), {visits[0], visits[0], visits[0]}), 0) << "it is a part of what is learnt";
}

TEST(VisitCursor, AVisitThatThePlanDoesNotHaveLeavesTheOthersInPlace) {
  VisitCursor cursor = begun();
  cursor.advance(0, Pass::kForward);
  EXPECT_EQ(cursor.advance(0, Pass::kForward), std::nullopt);
  EXPECT_EQ(cursor.advance(7, Pass::kForward), std::nullopt);
  EXPECT_EQ(cursor.unplanned(), 2u);
  EXPECT_EQ(cursor.advance(1, Pass::kForward), 1u);
  EXPECT_EQ(cursor.unplanned(), 2u);
}

TEST(VisitCursor, ThePassIsPartOfAVisit) {
  VisitCursor cursor = begun();
  EXPECT_EQ(cursor.advance(1, Pass::kBackward), 3u);
}

TEST(VisitCursor, TheOrderReallyTakenCanBecomeThePlan) {
  VisitCursor cursor = begun();
  const std::vector<Visit> taken = {{1, Pass::kForward}, {1, Pass::kForward}, {0, Pass::kBackward}};
  for (const Visit& visit : taken) cursor.advance(visit.block, visit.pass);
  cursor.adopt_recorded();
  EXPECT_FALSE(cursor.recording());
  cursor.begin_step();
  ASSERT_EQ(cursor.visits().size(), taken.size());
  const std::uint64_t before = cursor.unplanned();
  for (std::size_t v = 0; v < taken.size(); ++v) {
    EXPECT_TRUE(cursor.visits()[v] == taken[v]);
    EXPECT_EQ(cursor.advance(taken[v].block, taken[v].pass), v);
  }
  EXPECT_EQ(cursor.unplanned(), before);
}

TEST(VisitCursor, AnOrderThatWasGivenIsNotRecorded) {
  VisitCursor cursor(kVisits, false);
  cursor.begin_step();
  const VisitCursor::Position before = cursor.position();
  cursor.advance(0, Pass::kForward);
  cursor.take_back(before);
  EXPECT_EQ(cursor.advance(0, Pass::kForward), 0u);
  EXPECT_FALSE(cursor.recording());
  EXPECT_TRUE(begun().recording());
}

TEST(VisitCursor, AStepThatIsStartedAgainRecordsOnlyItsLastTry) {
  VisitCursor cursor = begun();
  cursor.advance(0, Pass::kForward);
  cursor.begin_step();
  cursor.advance(1, Pass::kForward);
  cursor.adopt_recorded();
  ASSERT_EQ(cursor.visits().size(), 1u);
  EXPECT_EQ(cursor.visits()[0].block, 1u);
}

TEST(VisitCursor, AVisitTakenBackMayBeMadeAgain) {
  VisitCursor cursor = begun();
  cursor.advance(0, Pass::kForward);
  const VisitCursor::Position before = cursor.position();
  EXPECT_EQ(cursor.advance(0, Pass::kBackward), 2u);
  cursor.take_back(before);
  EXPECT_EQ(cursor.unplanned(), 0u);
  EXPECT_EQ(cursor.advance(1, Pass::kForward), 1u);
  cursor.adopt_recorded();
  ASSERT_EQ(cursor.visits().size(), 2u);
  EXPECT_EQ(cursor.visits()[1].block, 1u);
}

}  // namespace
}  // namespace spillway
