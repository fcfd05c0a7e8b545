// Records that a drive does not give back. pread(2) is replaced by the linker: it fails for bytes that a test names.
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "spillway/log.h"
#include "tests/swap/store_fixture.h"

namespace {

std::vector<off_t>& bad_offsets() {
  static std::vector<off_t> offsets;
  return offsets;
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
ssize_t __real_pread64(int fd, void* to, size_t bytes, off_t offset);
ssize_t __real_pread(int fd, void* to, size_t bytes, off_t offset);
ssize_t __wrap_pread64(int fd, void* to, size_t bytes, off_t offset) {
  for (off_t bad : bad_offsets()) {
    if (offset <= bad && bad < offset + static_cast<off_t>(bytes)) return errno = EIO, -1;
  }
  return __real_pread64(fd, to, bytes, offset);
}
ssize_t __wrap_pread(int fd, void* to, size_t bytes, off_t offset) { return __wrap_pread64(fd, to, bytes, offset); }
// NOLINTEND
}

namespace spillway::testing {
namespace {

class StoreRecords : public ::testing::Test {
 protected:
  StoreRecords() {
    HostArena arena(4 << 20, kPinnedArena);
    auto store = TileStore::create(directory_.path(), three_tiles(), false);
    auto thread = thread_for(*store, arena);
    for (std::uint64_t step = 0; step <= 2; ++step) {
      write_tiles(*store, three_tiles(), *thread, arena, step, step == 0);
      store->commit(step, {}, *thread, arena.memory());
    }
    layout_ = store->layout();
  }
  ~StoreRecords() override { bad_offsets().clear(); }

  // The step that opening ends at, and what it says.
  std::pair<std::uint64_t, std::string> opened() const {
    std::string said;
    set_log_sink([&said](LogLevel, std::string_view message) { said += std::string(message) + "\n"; });
    const std::uint64_t step = TileStore::open(directory_.path(), three_tiles())->committed().step;
    set_log_sink({});
    return {step, said};
  }

  StoreDirectory directory_;
  StoreLayout layout_;
};

TEST_F(StoreRecords, ACopyThatCannotBeReadLeavesTheOther) {
  bad_offsets() = {static_cast<off_t>(layout_.record_offset[1][0])};
  const auto [step, said] = opened();
  EXPECT_EQ(step, 2u);
  EXPECT_NE(said.find("failed (Input/output error)"), std::string::npos) << said;
  EXPECT_NE(said.find("one of the two copies of a manifest record is damaged"), std::string::npos) << said;
}

TEST_F(StoreRecords, TwoThatCannotBeReadLeaveTheOlderStep) {
  for (std::uint64_t copy : layout_.record_offset[1]) bad_offsets().push_back(static_cast<off_t>(copy));
  const auto [step, said] = opened();
  EXPECT_EQ(step, 1u);
  EXPECT_NE(said.find("going back to step 1 and checking every byte of it"), std::string::npos) << said;
}

TEST_F(StoreRecords, NoneThatCanBeReadIsAnError) {
  for (const auto& record : layout_.record_offset) {
    for (std::uint64_t copy : record) bad_offsets().push_back(static_cast<off_t>(copy));
  }
  EXPECT_THROW(opened(), Error);
}

}  // namespace
}  // namespace spillway::testing
