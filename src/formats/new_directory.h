// A directory that is complete or not there. It is filled under another name beside its place, and gets its own when
// all of it is on the drive.
//
//   .step-000123.partial/     locked while it is written; says itself, in a file, that Spillway may remove it
//      │ finish(): sync of the directory ─► rename ─► sync of its parent
//   step-000123/
//
// What a killed process left is recognised by that file, whoever left it, and removed by the next create() in the same
// parent: nothing else ever is. Thread: one. Errors: kExists, kBusy (another process writes the same directory), kIo.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace spillway {

class NewDirectory {
 public:
  // Makes parents as need be. `place` must not exist; with `replace` it may, and finish() puts the new directory in its
  // place in one step.
  static NewDirectory create(const std::filesystem::path& place, bool replace = false);
  NewDirectory(NewDirectory&& other) noexcept;
  NewDirectory& operator=(NewDirectory&&) = delete;
  ~NewDirectory();  // without finish(): removes what was written

  const std::filesystem::path& path() const { return partial_; }  // where its files go; plain files only
  void finish();                                                  // every file has been synced

 private:
  NewDirectory() = default;
  std::filesystem::path place_, partial_;
  bool replace_ = false;
  int lock_ = -1;  // -1: finished, or moved from
};

// Removes a complete directory of plain files so that no part of it is ever seen under its name.
void remove_directory(const std::filesystem::path& place);

// The names of everything in it but of what this module puts there, sorted.
std::vector<std::string> names_in(const std::filesystem::path& directory);

}  // namespace spillway
