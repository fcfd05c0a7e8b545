// A small file system of its own for one test: in an image behind a loop device, or in memory (tmpfs). Needs root.
//
// It is mounted in a mount namespace that this process enters, so it goes away with the process however that ends; the
// image is unlinked and the loop device marked to be freed as soon as they are mounted.
#pragma once

#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "spillway/units.h"
#include "temp_files.h"

namespace spillway::testing {

struct MountOptions {
  std::string kind = "ext4";         // or xfs, btrfs, tmpfs
  std::uint64_t bytes = 320 * kMiB;  // xfs takes no less than 300 MiB; the image is sparse
  std::uint32_t sector_bytes = 512;  // of the loop device
  std::string mount_options = {};    // of the file system, as in `mount -o`
};

class LoopMount {
 public:
  explicit LoopMount(const MountOptions& options) {
    if (!enter_private_mounts()) return;
    if (options.kind == "tmpfs") {
      mount_it("none", options, "size=" + std::to_string(options.bytes));
    } else {
      mount_image(options);
    }
  }
  ~LoopMount() {
    if (mounted_) ::umount2(path().c_str(), MNT_DETACH);
  }
  LoopMount(const LoopMount&) = delete;
  LoopMount& operator=(const LoopMount&) = delete;

  // Why there is none here; empty: it is mounted.
  const std::string& refusal() const { return refusal_; }
  const std::filesystem::path& path() const { return dir_.path(); }
  std::filesystem::path operator/(const std::string& name) const { return dir_ / name; }

 private:
  bool enter_private_mounts() {
    static const std::string reason = [] {
      if (::geteuid() != 0) return std::string("mounting a file system needs root");
      if (::unshare(CLONE_NEWNS) != 0) return std::string("no mount namespace: ") + std::strerror(errno);
      if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
        return std::string("the mount namespace cannot be made private: ") + std::strerror(errno);
      }
      return std::string();
    }();
    refusal_ = reason;
    return refusal_.empty();
  }

  void mount_image(const MountOptions& options) {
    TempDir images;
    const std::filesystem::path image = images / "image";
    std::FILE* const file = std::fopen(image.c_str(), "w");
    const bool sized = file && ::ftruncate(::fileno(file), static_cast<off_t>(options.bytes)) == 0;
    if (file) std::fclose(file);
    if (!sized) {
      refusal_ = std::string("no image file: ") + std::strerror(errno);
      return;
    }
    std::string device;
    if (!run("losetup --find --show --sector-size " + std::to_string(options.sector_bytes) + " " + image.string(),
             device)) {
      return;
    }
    while (!device.empty() && device.back() == '\n') device.pop_back();
    std::string said;
    const std::string force = options.kind == "ext4" ? " -q -F " : " -q -f ";
    if (run("mkfs." + options.kind + force + device, said)) mount_it(device, options, options.mount_options);
    // In use, a loop device is freed with its mount; not mounted, at once.
    std::string refusal = std::exchange(refusal_, {});
    run("losetup --detach " + device, said);
    if (!refusal.empty()) refusal_ = refusal;
  }

  void mount_it(const std::string& device, const MountOptions& options, const std::string& data) {
    mounted_ = ::mount(device.c_str(), path().c_str(), options.kind.c_str(), 0, data.c_str()) == 0;
    if (!mounted_) refusal_ = options.kind + " cannot be mounted: " + std::strerror(errno);
  }

  // What the command printed; false, with the reason, when it failed.
  bool run(const std::string& command, std::string& printed) {
    printed.clear();
    std::FILE* const pipe = ::popen(("PATH=$PATH:/usr/sbin:/sbin " + command + " 2>&1").c_str(), "r");
    if (pipe == nullptr) {
      refusal_ = command + ": " + std::strerror(errno);
      return false;
    }
    char part[256];
    while (std::fgets(part, sizeof part, pipe) != nullptr) printed += part;
    const int status = ::pclose(pipe);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
    refusal_ = command + ": " + printed;
    return false;
  }

  TempDir dir_;
  std::string refusal_;
  bool mounted_ = false;
};

}  // namespace spillway::testing
