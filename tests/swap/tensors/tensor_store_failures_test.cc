// Drives that fail or linger under a store of named tensors, each at the moment that a test chooses: pread(2) and
// pwrite(2) are replaced by the linker. What one tensor's failure leaves of the others, and who waits for whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "tests/error_of.h"
#include "tests/swap/tensors/tensor_store_fixture.h"

namespace {

struct Transfer {
  bool write;
  std::uint64_t offset, bytes;  // in a file
  std::thread::id thread;
};
using Drive = std::function<int(const Transfer&)>;  // the errno that it ends with; 0: it is made

std::mutex drive_mutex;
std::shared_ptr<const Drive> drive_now;

void set_drive(Drive drive) {
  const std::lock_guard lock(drive_mutex);
  drive_now = drive ? std::make_shared<const Drive>(std::move(drive)) : nullptr;
}

int error_of_drive(bool write, off_t offset, size_t bytes) {
  std::shared_ptr<const Drive> drive;
  {
    const std::lock_guard lock(drive_mutex);
    drive = drive_now;
  }
  return drive ? (*drive)({write, static_cast<std::uint64_t>(offset), bytes, std::this_thread::get_id()}) : 0;
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
ssize_t __real_pread64(int fd, void* to, size_t bytes, off_t offset);
ssize_t __real_pwrite64(int fd, const void* from, size_t bytes, off_t offset);
ssize_t __wrap_pread64(int fd, void* to, size_t bytes, off_t offset) {
  if (const int error = error_of_drive(false, offset, bytes)) return errno = error, -1;
  return __real_pread64(fd, to, bytes, offset);
}
ssize_t __wrap_pwrite64(int fd, const void* from, size_t bytes, off_t offset) {
  if (const int error = error_of_drive(true, offset, bytes)) return errno = error, -1;
  return __real_pwrite64(fd, from, bytes, offset);
}
ssize_t __wrap_pread(int fd, void* to, size_t bytes, off_t offset) { return __wrap_pread64(fd, to, bytes, offset); }
ssize_t __wrap_pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  return __wrap_pwrite64(fd, from, bytes, offset);
}
// NOLINTEND
}

namespace spillway {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience(60);

// The first that comes to it waits, another one sees that and opens it.
class Gate {
 public:
  void come() {
    if (!closed_.exchange(false)) return;
    came_.set_value();
    opened_.get_future().wait();
  }
  void wait_for_somebody() { came_.get_future().wait(); }
  void open() { opened_.set_value(); }

 private:
  std::atomic<bool> closed_ = true;
  std::promise<void> came_, opened_;
};

// Until the thread waits for something, as `S` in the state of a task says.
void wait_until_asleep(::pid_t thread) {
  for (int times = 0; times < 20;) {
    std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
    const std::string line((std::istreambuf_iterator<char>(stat)), {});
    times = line.find(") S ") != std::string::npos ? times + 1 : 0;
    std::this_thread::yield();
  }
}

class TensorStoreOnBadDrive : public TensorStoreHbmTest {
 protected:
  ~TensorStoreOnBadDrive() override {
    set_drive({});
    set_log_sink({});
  }
  TensorStoreOptions on_one_drive() const {
    TensorStoreOptions wanted = options();
    wanted.paths = {one_.path()};
    wanted.io_engine = IoEngineKind::kThreads;  // which calls pread and pwrite
    return wanted;
  }
  // "y" is on the drive alone, of a MiB, and whatever is read from now on fails.
  void open_with_unreadable() {
    open(on_one_drive());
    put("y", bytes_of(1, kMiB));
    store_->commit();
    open(on_one_drive());
  }
};

TEST_F(TensorStoreOnBadDrive, AnotherTensorsFailedReadIsNoFailureOfAPut) {
  open_with_unreadable();
  Gate reading;
  set_drive([&](const Transfer& transfer) {
    if (transfer.write) return 0;
    reading.come();
    return EIO;
  });
  const std::string y = "y";
  EXPECT_EQ(store_->prefetch({&y, 1}), 1u);
  reading.wait_for_somebody();
  std::promise<::pid_t> thread;
  std::future<void> putting = std::async(std::launch::async, [&] {
    thread.set_value(::gettid());
    put("x", bytes_of(2, kMiB));  // host memory has room for one of them
  });
  wait_until_asleep(thread.get_future().get());
  reading.open();
  EXPECT_NO_THROW(putting.get());
  EXPECT_EQ(get("x"), bytes_of(2, kMiB));
  EXPECT_EQ(error_of([&] { get("y"); }).code(), Code::kIo);
  set_drive({});
  EXPECT_EQ(get("y"), bytes_of(1, kMiB));
}

TEST_F(TensorStoreOnBadDrive, AMessageIsSaidWhileTheStoreIsFree) {
  open_with_unreadable();
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view message) {
    said.emplace_back(message);
    EXPECT_TRUE(store_->contains("y"));
  });
  set_drive([](const Transfer& transfer) { return transfer.write ? 0 : EIO; });
  const std::string y = "y";
  store_->prefetch({&y, 1});
  // Each of them looks at what is over.
  for (int i = 0; said.empty() && i < 100'000; ++i) put("small", bytes_of(3, 100)), remove("small");
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], HasSubstr("read of 1048576 bytes"));
}

TEST_F(TensorStoreOnBadDrive, WhatIsFreeInHbmByNowIsNotWaitedFor) {
  TensorStoreOptions wanted = on_one_drive();
  wanted.host_bytes = kMiB;  // of which no tensor here fits into
  wanted.hbm_bytes = 2 * kMiB;
  wanted.device = DeviceKind::kHost;
  open(wanted);
  put("little", bytes_of(4, 100));
  put_up("old", bytes_of(1, kMiB));
  store_->commit();
  // A commit, which uses all that it names until it fails ...
  Gate table, tensor;
  std::promise<std::thread::id> committer;
  const std::shared_future<std::thread::id> committing = committer.get_future().share();
  set_drive([&](const Transfer& transfer) {
    if (!transfer.write) return 0;
    (transfer.thread == committing.get() ? table : tensor).come();
    return EIO;
  });
  std::future<void> commit = std::async(std::launch::async, [&] {
    committer.set_value(std::this_thread::get_id());
    store_->commit();
  });
  table.wait_for_somebody();
  remove("old");
  put_up("b", bytes_of(2, kMiB));
  // ... while a tensor is on its way out of HBM, which fails as well.
  std::future<void> putting = std::async(std::launch::async, [&] { put_up("new", bytes_of(3, kMiB)); });
  tensor.wait_for_somebody();
  table.open();
  EXPECT_EQ(error_of([&] { commit.get(); }).code(), Code::kIo);
  tensor.open();
  if (putting.wait_for(kPatience) != std::future_status::ready) {
    ADD_FAILURE() << "it waits for what is over";
    store_->pin("little");
    store_->unpin("little");  // wakes it
  }
  EXPECT_NO_THROW(putting.get());
  set_drive({});
  EXPECT_EQ(get("b"), bytes_of(2, kMiB));
  EXPECT_EQ(get("new"), bytes_of(3, kMiB));
  EXPECT_TRUE(in_hbm("b") && in_hbm("new"));
}

TEST_F(TensorStoreOnBadDrive, AForkIsRefusedWhileItsParentCommits) {
  open(on_one_drive());
  put("a", bytes_of(1, 100));
  Gate table;
  std::promise<std::thread::id> committer;
  const std::shared_future<std::thread::id> committing = committer.get_future().share();
  set_drive([&](const Transfer& transfer) {
    if (transfer.thread == committing.get()) table.come();
    return 0;
  });
  std::future<void> commit = std::async(std::launch::async, [&] {
    committer.set_value(std::this_thread::get_id());
    store_->commit();
  });
  table.wait_for_somebody();
  const ::pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    try {
      store_->commit();
    } catch (const Error& error) {
      ::_exit(std::string(error.what()).find("which forked this one") != std::string::npos ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  table.open();
  EXPECT_NO_THROW(commit.get());
}

TEST_F(TensorStoreOnBadDrive, ABadSectorIsOneBlock) {
  const Bytes bytes = bytes_of(1, kMiB);
  TensorStoreOptions small = on_one_drive();
  small.nvme_bytes = 2 * kMiB;
  open(small);
  put("a", bytes);
  store_->commit();
  store_.reset();
  std::ifstream file(one_.path() / kStoreFileName, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  const std::string wanted(reinterpret_cast<const char*>(bytes.data()) + 200'000, 100);
  const std::uint64_t bad = all.find(wanted);
  ASSERT_NE(bad, std::string::npos);
  set_drive([&](const Transfer& transfer) {
    return transfer.offset <= bad && bad < transfer.offset + transfer.bytes ? EIO : 0;
  });
  std::vector<BadTensor> found;
  verify_tensors({one_.path()}, [&](const BadTensor& one) { found.push_back(one); });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].offset, 196'608u);
  EXPECT_EQ(found[0].bytes, 65'536u);
  EXPECT_EQ(found[0].error, EIO);
}

// Commits are made between the look at the newest root and that at what it names.
TEST_F(TensorStoreOnBadDrive, AStoreThatCommitsMeanwhileIsInspected) {
  open(on_one_drive());
  put("a", bytes_of(1, 100));
  const std::uint64_t before = store_->commit();
  constexpr std::uint64_t kTables = 5 * 64 * kKiB;  // a file of one space: from where on tables and tensors are
  set_drive([&](const Transfer& transfer) {
    if (transfer.write || transfer.offset < kTables || transfer.bytes >= 64 * kKiB) return 0;
    set_drive({});
    for (int i = 0; i < 3; ++i) {
      put("b" + std::to_string(i), bytes_of(2, 100));
      store_->commit();
    }
    return 0;
  });
  const StoredTensors found = inspect_tensors({one_.path()});
  EXPECT_TRUE(found.in_use);
  EXPECT_EQ(found.commits, before + 3);
  EXPECT_EQ(found.tensors.size(), 4u);
}

TEST_F(TensorStoreOnBadDrive, AWriteThatFailsSaysWhereTheTensorIs) {
  TensorStoreOptions wanted = on_one_drive();
  wanted.host_bytes = kMiB;
  wanted.hbm_bytes = 3 * kMiB;
  wanted.device = DeviceKind::kHost;
  open(wanted);
  put("in host memory", bytes_of(1, 100));
  set_drive([](const Transfer& transfer) { return transfer.write ? EIO : 0; });
  EXPECT_THAT(error_of([&] { store_->commit(); }).what(), HasSubstr("check the drive; it is still in host memory"));
  remove("in host memory");
  put_up("up", bytes_of(2, kMiB));
  EXPECT_THAT(error_of([&] { store_->commit(); }).what(), HasSubstr("check the drive; it is still in HBM"));
  EXPECT_THAT(error_of([&] { put("nowhere", bytes_of(3, kMiB)); }).what(),
              HasSubstr("check the drive, and put it again"));
  EXPECT_FALSE(store_->contains("nowhere"));
  EXPECT_EQ(get("up"), bytes_of(2, kMiB));
}

}  // namespace
}  // namespace spillway
