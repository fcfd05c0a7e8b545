// The files of a store: one per path, together one striped address space (stripe_map.h). Each begins and ends with a
// superblock that says which part of which store it is; a store whose parts do not belong together is refused.
//
//   path 0/spillway.store  | superblock | its share of the space … | copy |      offsets of the space start after the
//   path 1/spillway.store  | superblock | its share of the space … | copy |      superblock; with one path space = file
//
// Either copy suffices, and they are as far apart as the file goes. Whoever opens the store to use it, or checks it at
// a commit, writes a damaged copy anew. A store of an older format has the first copy alone.
//
// It knows names, locks and superblocks, and nothing of what lies in the space between: that is tile_store.h, or
// tensors/tensor_files.h. Transfers here are blocking, for what is small or rare; the others go through a queue over
// pointers() with stripes(). Thread: any, one at a time. Errors: kExists, kNotFound, kBusy, kCorrupt, kInvalidArgument,
// kUnsupported, kIo.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spillway/io_file.h"
#include "spillway/stripe_map.h"
#include "swap/extents.h"
#include "swap/policy/run_stores.h"
#include "swap/superblock.h"

namespace spillway {

inline constexpr const char* kStoreFileName = "spillway.store";

// The file of that name, open and exclusively locked: also the one that it names once the lock is had.
File open_locked(const std::filesystem::path& path, const FileOptions& options, double patience_seconds);

// O_DIRECT needs aligned memory. Zeroed.
struct AlignedBuffer {
  explicit AlignedBuffer(std::uint64_t size);
  std::span<std::byte> bytes() const { return {data.get(), size}; }
  std::uint64_t size;
  std::unique_ptr<std::byte, decltype(&std::free)> data;
};

class StoreFiles {
 public:
  static bool exist(std::span<const std::filesystem::path> directories);  // any of them
  static StripeMap stripes_of(std::span<const std::uint32_t> shares);
  // Size of a file of a new store whose space ends at `total_bytes`. Of all of them: disk_bytes().
  static std::uint64_t file_bytes(const StripeMap& stripes, std::uint32_t file, std::uint64_t total_bytes);

  // The name of a new file, and the removal of those that killed runs have left: kBusy when one's run goes on, for
  // longer than the patience, which a killed one may need to end.
  static std::filesystem::path temporary_name(const std::filesystem::path& directory);
  static void remove_leftovers(std::span<const std::filesystem::path> directories, double patience_seconds);
  // New files of their full size, locked, under temporary names that publish() ends. What is not published is removed.
  // shares: one per directory. in_place: where not empty, files of a store, locked, to take over in place of new ones.
  // Their space is never free, for a drive may owe it: ext4's reserve, of which root may have used some.
  static StoreFiles create(std::span<const std::filesystem::path> directories, std::span<const std::uint32_t> shares,
                           std::uint64_t total_bytes, std::vector<std::optional<File>> in_place = {});
  // Whether there are such files, which are whole until take_over().
  bool takes_over() const;
  void take_over(std::uint64_t total_bytes);
  static RunId new_run();  // random
  // Fills in part, shares, store_id and checksum of every file's superblocks, writes and syncs them; all else is given.
  void write_superblocks(Superblock block);
  // After the first commit: they stay under their temporary names, durable, also when this object ends.
  void keep();
  // Gives them their names, after the first commit; does nothing where they have them.
  void publish();

  // Existing files, locked; their superblocks are checked, also against each other, and mended.
  static StoreFiles open(std::span<const std::filesystem::path> directories, double patience_seconds);
  // The same in two parts: nothing is changed before repair().
  static StoreFiles find(std::span<const std::filesystem::path> directories, double patience_seconds);
  void repair();
  // A store that keep() has left and publish() has not given its names: whole, locked, and not another user's. Nothing
  // where there is none, or another process has it. With kWrite as find() does, which waits for a process that was
  // killed and has not quite ended; else as open_read_only().
  enum class Use : std::uint8_t { kInspect, kWrite };
  static std::optional<StoreFiles> find_waiting(std::span<const std::filesystem::path> directories, Use use,
                                                double patience_seconds);
  // The same to look at only: no byte can be written, and nobody is kept from looking as well. While it is open no
  // process can open the store to use it, unless one has it open already (in_use).
  static StoreFiles open_read_only(std::span<const std::filesystem::path> directories);
  bool in_use() const noexcept { return in_use_; }
  // Whether some file ends before its part of that space does.
  bool cut_short(std::uint64_t total_bytes) const;
  // Whether nobody but this user can have written what a file holds; nobody but root, that is.
  static bool is_ours(const File& file);
  // What a file says of itself, by the copy that is whole.
  static Superblock superblock_of(const File& file);
  // One whose path leads to something else, or which does not hold its part of a space that ends at `total_bytes`:
  // somebody removed, moved, replaced or cut it. Null: none. A superblock that is damaged is written anew.
  const File* missing(std::uint64_t total_bytes);

  StoreFiles(StoreFiles&&) noexcept = default;
  ~StoreFiles();

  // Takes the disk space for a space that ends at `total_bytes`; superblocks go on to say what they say.
  void reserve(std::uint64_t total_bytes);

  const Superblock& superblock() const noexcept { return block_; }
  // Whether one of the two superblocks of a file is damaged, or was when it was opened to look at.
  bool superblock_damaged(std::size_t file) const { return parts_[file].damaged; }
  const StripeMap& stripes() const noexcept { return stripes_; }
  std::vector<File*> pointers();
  std::span<const File> files() const noexcept { return files_; }

  // Whole transfers in the space.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();

  // The file that holds an offset of the space, and where in it.
  struct FileOffset {
    const File* file;
    std::uint64_t offset;
  };
  FileOffset place_of(std::uint64_t offset) const;

 private:
  // A file's superblock as it is on the drive, and where its copies lie.
  struct PartBlock {
    std::array<std::byte, sizeof(Superblock)> bytes;
    std::uint64_t second = 0;  // offset of the second copy; 0: there is none
    bool damaged = false, told = false;
  };
  enum class Copy : std::uint8_t { kRight, kDamaged, kGone };

  static StoreFiles assemble(std::vector<File> files);
  static PartBlock read_part(const File& file);
  std::uint64_t part_bytes(std::uint32_t file, std::uint64_t total_bytes) const;
  void place_second(std::uint32_t file);
  Copy copy_at(std::uint32_t file, std::uint64_t offset);
  void write_copy(std::uint32_t file, std::uint64_t offset);
  bool mend_copies(std::uint32_t file, bool in_use);
  StoreFiles(std::vector<File> files, StripeMap stripes) : files_(std::move(files)), stripes_(std::move(stripes)) {}

  template <class Byte, class Transfer>
  void for_each_run(std::uint64_t offset, std::span<Byte> bytes, Transfer transfer) const;

  std::vector<File> files_;
  StripeMap stripes_;
  Superblock block_{};
  std::vector<PartBlock> parts_;  // index as files_
  // kDraft: temporary ones, and the files are removed with this object.
  enum class Names : std::uint8_t { kOwn, kWaiting, kDraft };
  Names names_ = Names::kOwn;
  bool in_use_ = false;
  std::vector<std::uint64_t> bytes_before_;  // of files that are to be taken over; 0: new ones
  AlignedBuffer look_{kExtentAlignment};     // for superblocks
};

}  // namespace spillway
