// The files of a store of named tensors: those of any store (store_files.h), whose space has two root records, and
// after them whatever the tables and the tensors take.
//
//   | superblock | root 0, root 0', root 1, root 1' | parts of tables and tensors … |
//
// A commit writes a table into free space, syncs, overwrites the older of the two root records, and syncs again. The
// newest root record that can be read is the truth: should its table be damaged, so is the store (kCorrupt). What a
// table says: tensor_table.h. Thread: one at a time, but for what is const. Errors: as StoreFiles.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "swap/store_files.h"
#include "swap/tensors/free_ranges.h"
#include "swap/tensors/tensor_table.h"

namespace spillway {

class TensorFiles {
 public:
  // Without a name before publish().
  static std::unique_ptr<TensorFiles> create(std::span<const std::filesystem::path> directories, std::uint64_t bytes);
  static std::unique_ptr<TensorFiles> open(std::span<const std::filesystem::path> directories, double patience_seconds);
  static std::unique_ptr<TensorFiles> open_read_only(std::span<const std::filesystem::path> directories);

  // Of the newest commit. Its parts, and those of its table, are not free.
  std::vector<ReadRecord> take_tensors() { return std::move(tensors_); }
  std::uint64_t commits() const noexcept { return root_.commit; }

  // A commit in three parts: the first and the last change free(), the one between moves bytes and takes long.
  struct Draft {
    TableRoot root;
    std::vector<std::byte> table;
  };
  Draft begin_commit(std::span<const NamedRecord> tensors);  // kDoesNotFit
  // Writes the table, syncs that and what was written before, then makes the commit.
  void make_commit(const Draft& draft);
  void end_commit(Draft draft);      // that was made: parts of the table before it are free
  void abandon_commit(Draft draft);  // that was not
  // After a commit of which it is not known whether it was made nothing may be written any more (kIo).
  void refuse_uncertain() const;
  bool uncertain() const noexcept { return uncertain_; }
  void publish() { files_.publish(); }

  FreeRanges& free() noexcept { return free_; }
  // Without what the table of the next commit takes.
  std::uint64_t free_for_tensors() const;
  // Takes record.parts, beside which there is room for the table of the next commit, which has the tensor; false, and
  // nothing is taken: there is not.
  bool take_parts(const std::string& name, TensorRecord& record);
  // Of a tensor that the next commit will not have: what it took, which is not free yet.
  std::vector<Extent> give_up(const std::string& name, TensorRecord& record);
  const FreeRanges& free() const noexcept { return free_; }
  std::uint64_t capacity() const noexcept { return capacity_; }
  StoreFiles& files() noexcept { return files_; }
  const StoreFiles& files() const noexcept { return files_; }
  bool damaged_root() const noexcept { return damaged_root_; }

 private:
  TensorFiles(StoreFiles files, std::uint64_t total_bytes);
  void read_newest();
  std::optional<TableRoot> newest_root();
  bool take_newest();  // what root_ names; false: that cannot be
  std::uint64_t kept_for_tables() const;
  void write_root(const TableRoot& root);
  std::vector<std::byte> read_table(const TableRoot& root) const;

  StoreFiles files_;
  FreeRanges free_;
  std::uint64_t capacity_;
  TableRoot root_;
  std::uint64_t next_table_bytes_ = kEmptyTableBytes;  // of the tensors that have taken their parts
  std::vector<ReadRecord> tensors_;
  bool damaged_root_ = false;
  std::atomic<bool> uncertain_ = false;
};

}  // namespace spillway
