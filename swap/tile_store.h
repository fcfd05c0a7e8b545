// The durable side of a model: two slots of every tile, and the manifest that says which of the two is committed, in
// the striped space of one preallocated file per path (store_files.h).
//
//   read from   readable(tile)      the slot written since the last commit, else the committed one
//   write to    writable(tile)      never the committed slot (with two slots)
//   note_written(tile, checksums)   from now on that slot is the readable one
//   commit(step, blob)              sync, manifest record, sync: now it is the committed one
//
// It says where a tile is read and written and moves no tile itself: TileMover and BlockFetcher do. tile_store.cc has
// making, slots and commits; tile_store_open.cc has opening and rolling back.
//
// The engine calls from one thread at a time; transfers run on the store's thread. A slot is only ever written after
// writable(), so a crash at any moment leaves the committed slots as they were. Errors: kExists, kNotFound, kBusy,
// kCorrupt, kInvalidArgument (another model), kIo.
// Read next: extents.h (where slots lie), manifest.h (what a commit says), store_files.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/remedy.h"
#include "swap/extents.h"
#include "swap/manifest.h"
#include "swap/store_files.h"
#include "swap/store_shape.h"
#include "swap/store_thread.h"

namespace spillway {

// What an unprivileged user may still write there.
std::uint64_t free_disk_bytes(const std::filesystem::path& directory);

struct StorePaths {
  StorePaths(std::filesystem::path only) : directories{std::move(only)} {}
  StorePaths(std::vector<std::filesystem::path> all) : directories(std::move(all)) {}

  std::vector<std::filesystem::path> directories;
  std::vector<std::uint32_t> shares;  // of a new store (stripe_map.h); empty: equal ones
};

class TileStore {
 public:
  // The kernel may still finish a killed holder's writes.
  static constexpr double kLockPatienceSeconds = 10;

  static bool exists(const StorePaths& paths);  // in any of them
  // What a new store there would make free: an existing file, and one that a killed run has left.
  static std::uint64_t file_bytes(const std::filesystem::path& directory);

  // Makes a new store, which is there for others with its first commit(). An existing one is replaced only when
  // `replace`: by that commit, or now, where a disk has no room for both and the new one takes over its file;
  // `before_loss`, unless null, is called first and may throw. Where there is no room an existing one stays.
  static std::unique_ptr<TileStore> create(const StorePaths& paths, const StoreShape& shape, bool replace,
                                           const std::function<void()>& before_loss = {});
  // The same in parts, between which ranks agree. kExists where there is one; kBusy where it is in use.
  static void refuse_existing(const StorePaths& paths);
  // Of a store that is to be replaced: whether the new one takes over its file where a disk has no room for both.
  enum class Existing : std::uint8_t { kNone, kMakesRoom, kStays };
  // Takes the space; an existing store is as it was, also where make() will take over its file.
  static std::unique_ptr<TileStore> reserve_new(const StorePaths& paths, const StoreShape& shape, Existing existing);
  // The same beside stores that another one's ranks have locked, and which go when the new one's are complete: no file
  // of theirs is taken over.
  static std::unique_ptr<TileStore> reserve_beside(const StorePaths& paths, const StoreShape& shape);
  bool takes_over() const { return files_.takes_over(); }
  void make(const StoreShape& shape, const RunId& run);  // `run`: the same on all ranks
  // Opens an existing store of exactly this shape and identity at its last commit; its disk space is reserved, and
  // its scratch area grows to what a run cannot do without.
  static std::unique_ptr<TileStore> open(const StorePaths& paths, const StoreShape& shape);
  // Of bytes that are read and compared, which may take minutes.
  using Progress = std::function<void(std::uint64_t done, std::uint64_t bytes)>;
  // The same in parts: files that are locked (StoreFiles::find, find_waiting), of which nothing is changed yet. Where
  // the newest record is damaged every byte of the step before is read.
  static std::unique_ptr<TileStore> found(StoreFiles files, const StoreShape& shape, const Progress& progress = {});
  RankCommits commits() const noexcept;
  // Reads every byte of the commit before the last, which must be there; throws kCorrupt when one is not as it was.
  void check_before(const StoreShape& shape, const Progress& progress = {});
  // From here on the store is used: at its last commit, or at the one before, which then is the last.
  void begin(const StoreShape& shape, bool at_before = false);
  // In place of begin(), to read the commit before the last, which must be there.
  void go_to_before();
  // To read what is committed; nothing is changed, so it may lie where nothing can be written.
  static std::unique_ptr<TileStore> open_to_read(const StorePaths& paths, const StoreShape& shape);
  // Makes the older record's step the committed one, once every byte of it is verified; throws kCorrupt, with nothing
  // changed, when it cannot be. Returns the step.
  static std::uint64_t roll_back(const StorePaths& paths, const StoreShape& shape, const Progress& progress);
  // Its parts, for the stores of several ranks, which go back together. Each changes one record, and no other byte.
  static RankCommits commits_of(const ManifestChoice& choice);
  static void check_older(StoreFiles& files, const StoreLayout& layout, const Manifest& older, const StoreShape& shape,
                          const Progress& progress);
  static void take_older(StoreFiles& files, const StoreLayout& layout, ManifestChoice& choice, std::uint64_t counts_on);
  static void forget_newest(StoreFiles& files, const StoreLayout& layout, const Manifest& newest);
  // kInvalidArgument where a store is of another model, or made with other settings, than those that the shape is of.
  static void refuse_other_model(const StoreFiles& files, const StoreShape& shape);
  // kUnsupported where no step is kept.
  static void refuse_one_slot(const StoreFiles& files);
  // What the store is a store of.
  static std::string read_description(const StoreFiles& files);

  // For who only looks (StoreFiles::open_read_only): where everything lies in a store of this shape, and its records.
  // Throw like open().
  static StoreLayout read_layout(const StoreFiles& files, const StoreShape& shape);
  static ManifestChoice read_records(const StoreFiles& files, const StoreLayout& layout);
  static bool has_commit(const StoreFiles& files);  // whatever its shape

  StoreFiles& files() noexcept { return files_; }
  const StoreFiles& files() const noexcept { return files_; }
  const StoreLayout& layout() const noexcept { return layout_; }
  const Manifest& committed() const noexcept { return committed_; }
  std::uint32_t slots() const noexcept { return slots_; }

  struct Slot {
    Extent extent[kParts];
    std::uint64_t checksum[kParts] = {};
  };
  Slot readable(std::uint32_t tile) const;
  Slot committed(std::uint32_t tile) const;
  // Checksums unset. Not while unverified().
  Slot writable(std::uint32_t tile) const;
  // After open(), while there is an older step to go back to: the next step overwrites it tile by tile, and a damaged
  // tile of the last one that is found only then would leave neither. So every trainable tile is read and verified
  // first. (Both steps have the frozen ones in the same slots.)
  bool unverified() const noexcept { return unverified_; }
  void note_verified() noexcept { unverified_ = false; }
  void note_written(std::uint32_t tile, Part part, std::uint64_t checksum);
  bool written(std::uint32_t tile, Part part) const { return written_[tile].part[index_of(part)]; }
  // Forgets everything written since the last commit.
  void forget_written();
  // A write failed: there is no commit any more.
  void note_lost() noexcept { lost_ = true; }

  // Bytes of aligned, registered memory that commit() needs.
  std::uint64_t commit_buffer_bytes() const { return record_bytes(form_); }
  // Makes the written slots the committed ones. Every write must have completed. Blocks. Throws kIo when one of them
  // was lost, with the last commit as it was. Where files of the store are not there any more it succeeds: missing().
  // update_counts: see Manifest; kUnsupported, with nothing written, when the store's format has no room for them.
  void commit(std::uint64_t step, std::span<const std::byte> blob, StoreThread& thread, std::span<std::byte> buffer,
              std::span<const std::uint64_t> update_counts = {});
  // With several ranks a commit is this rank's alone, until all are known to have made it: an all_reduce says so, and
  // then note_all_committed() is called, with which a new store gets its name. In between neither writable() nor
  // commit() may be called: the step before stays whole, for a rank that died on the way to its commit has no other.
  // So whoever is killed at any moment is at most one commit ahead of the others, and can go back. With one rank
  // there is nothing to wait for.
  bool awaits_others() const noexcept { return awaits_others_; }
  void note_all_committed();
  // Whether a commit has room for update counts.
  bool keeps_update_counts() const noexcept;
  // One of its files that nobody finds after this process, as it was removed, moved or cut short. Null: none.
  const File* missing() { return files_.missing(layout_.total_bytes); }

  // What to do when bytes at this offset of the space are not what was written: which committed step can be gone back
  // to, and how.
  Hint way_back(std::uint64_t offset) const;

 private:
  TileStore(StoreFiles files, const StoreShape& shape, StoreLayout layout);
  static RecordForm form_of(const Superblock& block);
  static std::vector<std::uint32_t> shares_of(const StorePaths& paths);
  static std::unique_ptr<TileStore> drafted(StoreFiles files, const StoreShape& shape);
  void get_name();
  void write_description(const StoreShape& shape, const RunId& run);
  void write_text(const std::string& description);
  void make_room();
  void load_manifest(const StoreShape& shape, const Progress& progress);
  void check_description(const StoreShape& shape);
  void rewrite_record();
  void reserve(std::uint64_t least_scratch_bytes);

  struct Written {
    bool part[kParts] = {};
    std::uint64_t checksum[kParts] = {};
  };
  StoreFiles files_;
  std::vector<File>
      replaced_;  // of the store whose place this one takes: locked, so that nobody trains in it meanwhile
  RecordForm form_;
  std::uint32_t slots_ = 2, ranks_ = 1;
  StoreLayout layout_;
  Manifest committed_, next_;
  std::vector<Written> written_;
  std::optional<Manifest> before_;  // between found() and begin()
  bool lost_ = false, unverified_ = false, awaits_others_ = false;
  // The step of the other record, as long as nothing of it was overwritten since this process has the store.
  std::optional<std::uint64_t> older_step_;
};

// What lies where a store is to be: the one that has its name there, and one that is committed and waits for it. Both
// are locked (to look: see StoreFiles::open_read_only), and nothing of them is changed.
struct FoundStores {
  // kReplace: what is wrong with one that has its name is of no concern, but that another process uses it.
  enum class Purpose : std::uint8_t { kUse, kReplace, kInspect };
  FoundStores(const StorePaths& paths, Purpose purpose);
  RankStores runs() const;

  // One of the two, to look at.
  static std::optional<StoreFiles> inspect_named(const StorePaths& paths);
  static std::optional<StoreFiles> inspect_waiting(const StorePaths& paths);

  std::optional<StoreFiles> named, waiting;
};

}  // namespace spillway
