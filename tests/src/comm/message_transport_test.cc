// A transport of messages: what of their failures ends a communicator, and when. That it does what every other one does
// is communicator_test.cc's.
#include "src/comm/message_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Rank 0 of three, whose messages the test itself carries.
struct MessageTransportTest : ::testing::Test {
  struct Started {
    bool is_send;
    std::uint32_t peer;
    Channel channel;
    std::size_t bytes;
    Message message;
  };
  std::deque<Started> started;
  std::optional<Parting> parting;
  std::vector<std::byte> data = std::vector<std::byte>(12);
  MessageTransport transport{{.rank = 0,
                              .ranks = 3,
                              .library = "messages",
                              .send =
                                  [this](std::uint32_t to, Channel channel, std::span<const std::byte> of, Message m) {
                                    started.push_back({true, to, channel, of.size(), std::move(m)});
                                  },
                              .receive =
                                  [this](std::uint32_t from, Channel channel, std::span<std::byte> of, Message m) {
                                    started.push_back({false, from, channel, of.size(), std::move(m)});
                                  },
                              .close = [this](Parting how) { parting = how; }}};

  std::vector<Ticket> over() {
    std::array<Ticket, 8> tickets;
    const std::size_t count = transport.poll(tickets);
    return {tickets.begin(), tickets.begin() + static_cast<std::ptrdiff_t>(count)};
  }
};

TEST_F(MessageTransportTest, AnOperationIsOverWhenAllOfItsMessagesAre) {
  transport.all_gather(data, std::array{SlicePart{0, 4}, SlicePart{4, 8}, SlicePart{12, 0}}, 7);
  ASSERT_EQ(started.size(), 3u) << "its own part to two, and that of one which has something";
  for (const Started& each : started) {
    EXPECT_THAT(over(), IsEmpty());
    each.message.over();
  }
  EXPECT_THAT(over(), ElementsAre(7));
  transport.all_gather(data, std::array{SlicePart{}, SlicePart{}, SlicePart{}}, 8);
  EXPECT_THAT(over(), ElementsAre(8)) << "nobody has anything";
  EXPECT_TRUE(transport.failure().empty());
}

TEST_F(MessageTransportTest, ARankWhoseWordsDoNotComeIsNamedAtOnce) {
  transport.receive(2, Channel::kWords, data, 1);
  started[0].message.over("closed by peer");
  EXPECT_THAT(over(), IsEmpty());
  EXPECT_EQ(transport.failure(), "from or to rank 2: closed by peer");
}

TEST_F(MessageTransportTest, AWordThatNobodyHearsIsNoFailure) {
  transport.send(2, Channel::kWords, data, 1);
  started[0].message.over("closed by peer");
  EXPECT_THAT(over(), ElementsAre(1));
  EXPECT_TRUE(transport.failure().empty());
}

TEST_F(MessageTransportTest, DataThatDoesNotComeGivesWordsTheirTime) {
  transport.receive(2, Channel::kData, data, 1);
  started[0].message.over("closed by peer");
  EXPECT_THAT(over(), IsEmpty());
  EXPECT_TRUE(transport.failure().empty()) << "its last word may be on its way to us";
  while (transport.failure().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(transport.failure(), "from or to rank 2: closed by peer");
}

TEST_F(MessageTransportTest, MemoryIsLetGoWhenNoMessageHasIt) {
  transport.receive(1, Channel::kWords, data, 1);
  EXPECT_FALSE(transport.close(Parting::kLost));
  EXPECT_EQ(parting, Parting::kLost);
  started[0].message.over("given up");
  EXPECT_TRUE(transport.close(Parting::kEarly));
}

TEST(MessageInboxTest, AMessageMayBeOverWhenItsTransportHasGone) {
  std::optional<Message> last;
  {
    std::vector<std::byte> data(4);
    MessageTransport transport({.rank = 0,
                                .ranks = 2,
                                .library = "messages",
                                .send = {},
                                .receive = [&](auto, auto, auto, Message message) { last = std::move(message); },
                                .close = {}});
    transport.receive(1, Channel::kData, data, 1);
  }
  last->over();
}

}  // namespace
}  // namespace spillway
