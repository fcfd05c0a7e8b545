// What a store holds and whether it is whole, for whoever looks after stores: neither the model's files nor a
// configuration are needed, and nothing but roll_back_store() changes a byte.
//
// `paths`: all directories of one store, in the order of spillway.nvme_paths; at least one. Several ranks have a store
// each, and the functions below that are named after a run take all of them. Thread: any, one at a time.
// Errors: kNotFound, kBusy, kCorrupt, kInvalidArgument (parts that do not belong together), kUnsupported, kIo.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "spillway/dtype.h"
#include "spillway/model.h"
#include "spillway/optimizer.h"

namespace spillway {

enum class RecordState : std::uint8_t { kEmpty, kValid, kDamaged };

// One stored copy of a commit record. A store has two records, which alternate, and two copies of each.
struct RecordCopy {
  RecordState state = RecordState::kEmpty;
  std::uint64_t sequence = 0, step = 0;  // of a valid one: which commit it is, and of which step
};
using StoreRecords = std::array<std::array<RecordCopy, 2>, 2>;  // [record][copy]

struct StoreFileInfo {
  std::filesystem::path path;
  std::uint32_t share = 1;  // of the space, against those of the other files
  std::uint64_t bytes = 0;
  bool superblock_damaged = false;  // one of the two; the next run that opens the store writes it anew
};

struct StoreInfo {
  std::uint32_t format = 0;
  std::uint64_t fingerprint = 0;  // of whatever must be equal for a store to fit a run
  std::string run;                // 32 hexadecimal digits: kept from the store's first step on; empty before format 4
  std::uint32_t rank = 0, ranks = 1;
  ModelDescription model;  // blocks and attachments
  DType weights = DType::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kAdam;
  MomentFormat moments = MomentFormat::kFloat32;  // where parameters are not kept exact
  std::uint64_t parameters = 0, trainable = 0;    // elements
  std::uint64_t tile_elements = 0, tiles = 0;
  std::uint32_t slots = 2;  // of a tile; with one there is no committed step to go back to
  // Of all tiles' weights and states, one slot each; the area for what a step spills. Padded.
  std::uint64_t weight_bytes = 0, state_bytes = 0, scratch_bytes = 0;
  std::vector<StoreFileInfo> files;
  bool in_use = false;  // a process has it open: it may be writing a record just now
  StoreRecords records;
  bool newest_lost = false;                 // a record that may have been newer than `step` cannot be read
  std::optional<std::uint64_t> step;        // that the next run goes on from
  std::optional<std::uint64_t> older_step;  // of the other record, whose bytes may be overwritten by now
  std::vector<std::byte> blob;              // the caller's own, of `step`
  std::vector<std::byte> older_blob;        // that of `older_step`
  // fp16, of `step`: what the next step's loss is multiplied with, and the steps so far that were skipped.
  std::optional<double> loss_scale;
  std::uint64_t skipped_steps = 0;
};

StoreInfo inspect_store(const std::vector<std::filesystem::path>& paths);

// Bytes that are not what was committed.
struct BadExtent {
  std::string name;  // `states of tile 3 of block h.0 (h.0.attn.c_attn.weight …)`
  std::filesystem::path file;
  std::uint64_t offset = 0, bytes = 0;  // in the file; of several files: where it starts
  int error = 0;                        // errno of a read that failed; 0: the checksum differs
};

struct CheckOptions {
  std::function<void(const BadExtent& bad)> on_bad = {};                             // each as it is found
  std::function<void(std::uint64_t done_bytes, std::uint64_t bytes)> progress = {};  // from time to time
};

struct CheckedStore {
  std::uint64_t step = 0, bytes = 0;
  std::uint64_t bad_extents = 0;
};

// Reads every byte of the step that the next run goes on from, with direct I/O through a queue of its own, and compares
// the checksums. No run can open the store meanwhile. Takes up to 64 MiB of memory.
CheckedStore verify_store(const std::vector<std::filesystem::path>& paths, const CheckOptions& options = {});

// Makes the older of the two committed steps the one that the next run goes on from, once every byte of it is verified;
// refused (kCorrupt, with nothing changed) when one is not as it was: a step that is under way overwrites the older
// one's. Returns the step. The store of one of several ranks is refused (kInvalidArgument).
std::uint64_t roll_back_store(const std::vector<std::filesystem::path>& paths, const CheckOptions& options = {});

// The stores of a run: of each rank the paths of its store, as above; rank 0's first.
using RunPaths = std::vector<std::vector<std::filesystem::path>>;

// Finds the stores of a run with several ranks below these directories, where rank r's lie in `<path>/rank<r>`: as many
// as the stores say that there are, whether all are there or not. Where a run was being continued by another number of
// ranks and was cut short, it returns the stores that the next run goes on with. Empty: there is none below. Throws
// kInvalidArgument when stores lie both below and in the directories, and what is wrong with the first one.
RunPaths find_ranks(const std::vector<std::filesystem::path>& paths);

struct RunInfo {
  std::vector<StoreInfo> ranks;       // in their order
  std::optional<std::uint64_t> step;  // the newest that all ranks have, which the next run goes on from
  std::string steps;                  // of each rank, for people
  // Ranks whose store has not got its name yet: a new run was taking the old one's place and was cut short after its
  // first store had; the next run finishes that and goes on with the new one.
  std::vector<std::uint32_t> unnamed;
  // Below the same directories, stores of ranks that this run does not have: of an older run with more of them.
  std::vector<std::filesystem::path> others;
};

// Refused as a run would be: kNotFound names the ranks that have no store, kInvalidArgument those with one of another
// run, and a store that is not of the rank in whose place it is.
RunInfo inspect_run(const RunPaths& paths);

// verify_store() of all ranks' stores, at the step that the next run goes on from. Bytes and extents are of all.
CheckedStore verify_run(const RunPaths& paths, const CheckOptions& options = {});

// Rolls all ranks back from the step that the next run would go on from to the one before, once every byte of that is
// verified on every rank; where some are ahead of the others, back to the step that all have. Returns the step. A crash
// on the way leaves the ranks at one step or the other: doing it again finishes it, and a run takes it back.
std::uint64_t roll_back_run(const RunPaths& paths, const CheckOptions& options = {});

}  // namespace spillway
