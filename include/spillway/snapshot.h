// Snapshots: everything that a run is at the end of a step, in a directory that needs nothing else. Engine::save()
// writes one, Engine::begin_save() does while training goes on; EngineOptions::snapshot begins a run with one, under
// whatever budgets, placements and tile size.
//
//   model.safetensors        the exact fp32 weights, under the model's names; frozen ones in the run's own type
//   exp_avg.safetensors      NAME.exp_avg      fp32; of the optimizers that keep one
//   exp_avg_sq.safetensors   NAME.exp_avg_sq   ditto
//   config.json, …           the model's attachments: with `model` a directory that Hugging Face's loaders take
//   spillway.json            the step, the caller's blob, a checksum of every tensor and attachment, and how many
//                            updates each parameter has had, once one was left out of some
//
// Moments that a run keeps in fewer bytes are widened to fp32; a run that keeps them in the same form goes on with the
// same bits. The weights that forward and backward use follow from the exact ones. Above SaveOptions::max_file_bytes a
// file is sharded as the field does it.
// Threads: any, one at a time for a directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "spillway/dtype.h"
#include "spillway/optimizer.h"
#include "spillway/safetensors.h"

namespace spillway {

struct SaveOptions {
  // A snapshot of this model that is there already is refused (kExists), or replaced in one step. On a file system that
  // cannot do that (NFS, most of FUSE) the old one is called DIRECTORY.replaced for a moment; if the process is killed
  // in that moment, the next save beside it gives it its name back. A symbolic link stays: the directory that it leads
  // to is replaced.
  bool replace = false;
  std::uint64_t max_file_bytes = kMaxFileBytes;  // of tensor data; above it files are sharded
  // Saves only what is trained (kInvalidArgument if nothing is). Engine::load_snapshot() puts it over a model that has
  // the rest; a run cannot begin with it, and it cannot be exported.
  bool leave_out_frozen = false;
};

struct SnapshotInfo {
  std::uint64_t step = 0;
  std::uint64_t model = 0;  // equal for runs of the same parameters, weight type and optimizer
  DType weights = DType::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kAdam;
  MomentFormat moments = MomentFormat::kFloat32;  // of the run; a run of another form converts them
};

// Nothing for a directory that is no whole snapshot; `why` says what is wrong with it. Attachments are verified;
// tensors are not read.
std::optional<SnapshotInfo> find_snapshot(const std::filesystem::path& directory, std::string* why = nullptr);

// Removes a snapshot; what is half removed when the process dies is no snapshot any more. Refused (kInvalidArgument),
// with nothing changed, when the directory is none, or holds anything that was not saved with it. Errors: kIo.
void remove_snapshot(const std::filesystem::path& directory);

}  // namespace spillway
