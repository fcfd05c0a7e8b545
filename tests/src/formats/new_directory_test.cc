#include "src/formats/new_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "spillway/error.h"
#include "tests/src/model_directory.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NewDirectoryTest : public ModelDirectory {
 protected:
  std::filesystem::path place() const { return directory_ / "model"; }
  void fill(const NewDirectory& made, const std::string& text) const {
    write_file(made.path().filename() / "weights", text);
  }
  void make(const std::string& text, bool replace = false) const {
    NewDirectory made = NewDirectory::create(place(), replace);
    fill(made, text);
    made.finish();
  }
  static Code code_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      return error.code();
    }
    ADD_FAILURE() << "nothing was refused";
    return Code::kUnsupported;
  }
  // What a process leaves that is killed while it writes: in a child, which runs `work` and dies of SIGKILL.
  static void killed(const std::function<void()>& work) {
    const pid_t child = ::fork();
    if (child == 0) {
      work();
      ::raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
  }
};

TEST_F(NewDirectoryTest, IsSeenWhenItIsFinishedAndNotBefore) {
  {
    NewDirectory made = NewDirectory::create(place());
    fill(made, "one");
    EXPECT_THAT(names(), ElementsAre(".model.partial"));
    made.finish();
  }
  EXPECT_THAT(names(), ElementsAre("model"));
  EXPECT_THAT(names("model"), ElementsAre("weights"));
}

TEST_F(NewDirectoryTest, WithoutFinishNothingIsLeft) {
  fill(NewDirectory::create(place()), "one");
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(NewDirectoryTest, WhatIsThereStaysUnlessItMayBeReplaced) {
  make("one");
  EXPECT_EQ(code_of([&] { make("two"); }), Code::kExists);
  EXPECT_EQ(read_file("model/weights"), "one");
  fill(NewDirectory::create(place(), true), "two");  // and given up
  EXPECT_EQ(read_file("model/weights"), "one");
  make("two", true);
  EXPECT_EQ(read_file("model/weights"), "two");
  EXPECT_THAT(names(), ElementsAre("model"));
  EXPECT_THAT(names("model"), ElementsAre("weights"));
}

TEST_F(NewDirectoryTest, WhatAKilledProcessLeftGoesWithTheNextDirectoryBesideIt) {
  killed([&] { new auto(NewDirectory::create(directory_ / "other")); });
  killed([&] {
    auto* made = new auto(NewDirectory::create(place()));
    fill(*made, "half");
  });
  EXPECT_THAT(names(), ElementsAre(".model.partial"));  // the second one removed what the first had left
  NewDirectory::create(directory_ / "third").finish();
  EXPECT_THAT(names(), ElementsAre("third"));
}

// Nothing but its own: not by the name alone, not with directories inside, not through a link.
TEST_F(NewDirectoryTest, WhatIsNotSpillwaysIsLeftAlone) {
  std::filesystem::create_directory(directory_ / ".mine.partial");
  write_file(".mine.partial/work", "of years");
  killed([&] {
    auto* made = new auto(NewDirectory::create(place()));
    std::filesystem::create_directory(made->path() / "mine");
  });
  std::filesystem::create_directory(directory_ / "elsewhere");
  write_file("elsewhere/.spillway-partial", "");
  std::filesystem::create_directory_symlink(directory_ / "elsewhere", directory_ / ".link.partial");
  NewDirectory::create(directory_ / "new").finish();
  EXPECT_THAT(names(), ElementsAre(".link.partial", ".mine.partial", ".model.partial", "elsewhere", "new"));
  EXPECT_EQ(read_file(".mine.partial/work"), "of years");
  EXPECT_THAT(names("elsewhere"), ElementsAre(".spillway-partial"));
  EXPECT_EQ(code_of([&] { NewDirectory::create(place()); }), Code::kBusy);
}

TEST_F(NewDirectoryTest, WhatAnotherProcessIsWritingStays) {
  int ready[2], done[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto* made = new auto(NewDirectory::create(place()));
    fill(*made, "one");
    char byte = 0;
    if (::write(ready[1], &byte, 1) == 1 && ::read(done[0], &byte, 1) == 1) made->finish();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  NewDirectory::create(directory_ / "other").finish();
  EXPECT_EQ(code_of([&] { NewDirectory::create(place()); }), Code::kBusy);
  EXPECT_EQ(read_file(".model.partial/weights"), "one");
  ASSERT_EQ(::write(done[1], &byte, 1), 1);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_THAT(names(), ElementsAre("model", "other"));
  for (const int end : {ready[0], ready[1], done[0], done[1]}) ::close(end);
}

TEST_F(NewDirectoryTest, ARemovedDirectoryIsGone) {
  make("one");
  remove_directory(place());
  EXPECT_THAT(names(), IsEmpty());
  EXPECT_EQ(code_of([&] { remove_directory(place()); }), Code::kNotFound);
}

TEST_F(NewDirectoryTest, AParentThatCannotBeIsAnError) {
  write_file("file", "in the way");
  EXPECT_EQ(code_of([&] { NewDirectory::create(directory_ / "file" / "model"); }), Code::kNotFound);
}

}  // namespace
}  // namespace spillway
