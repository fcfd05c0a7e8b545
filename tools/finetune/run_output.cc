#include "tools/finetune/run_output.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "spillway/units.h"
#include "tools/models/gpt2/model.h"

namespace spillway::models::finetune {
namespace {

constexpr const char* kTrial = ".spillway-trial-XXXXXX";

// `trial`: a name for mkdtemp() where it is to be written.
void prepare_directory(std::string trial, const std::filesystem::path& named, const char* what, const char* option) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(trial).parent_path(), error);
  // Only trying tells: the superuser is granted every access, also to what takes no directory.
  if (!error && (::mkdtemp(trial.data()) == nullptr || ::rmdir(trial.c_str()) != 0))
    error = {errno, std::generic_category()};
  if (!error) return;
  const bool full = error == std::errc::no_space_on_device;
  throw Error(Code::kIo, {.object = named.string(),
                          .happened = fmt::format("cannot take {}", what),
                          .errno_value = error.value(),
                          .hint = full ? fmt::format("make room, or name a directory on another drive in {}", option)
                                       : fmt::format("name a directory in {} that this user may write to", option)});
}

// What the trained model is written to first: files in its directory, or a directory beside it where that is made when
// it is complete. As long as its name there, `.NAME.partial`.
std::filesystem::path trial_of_model(const std::filesystem::path& out) {
  std::error_code ignored;
  const std::filesystem::path place = plain(out);
  if (std::filesystem::exists(place, ignored)) return place / kTrial;
  return place.parent_path() / fmt::format(".{}.pXXXXXX", place.filename().string());
}

// What every line of a log begins with: a file that begins otherwise, such as an input of the run, gets none.
bool is_no_log(const std::filesystem::path& path) {
  constexpr std::string_view kBeginning = R"({"step":)";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0) return false;
  std::string beginning(kBeginning.size(), '\0');
  std::ifstream(path).read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  return beginning != kBeginning;
}

}  // namespace

std::filesystem::path plain(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::absolute(path / "", ignored).parent_path();
}

void prepare_directories(const FinetuneOptions& options) {
  const std::filesystem::path& best = options.evaluation.best;
  if (!options.out.empty()) prepare_directory(trial_of_model(options.out), options.out, "the trained model", "--out");
  if (!best.empty()) prepare_directory(trial_of_model(best), best, "the best model", "--best");
  const std::filesystem::path& snapshots = options.snapshots.directory;
  if (!snapshots.empty()) prepare_directory(snapshots / kTrial, snapshots, "snapshots", "--save");
}

namespace {

void check_room(const std::filesystem::path& out, const char* option, std::uint64_t models,
                const ModelDescription& model) {
  if (out.empty()) return;
  constexpr std::uint64_t kHeaderEntry = 256;  // of a tensor: its name, type, shape and place
  std::uint64_t need = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) need += elements(parameter) * sizeof(float) + kHeaderEntry;
  }
  struct rlimit file {};  // of a file's size
  if (::getrlimit(RLIMIT_FSIZE, &file) == 0 && std::min(need, kMaxFileBytes) > file.rlim_cur) {
    throw Error(Code::kDoesNotFit, {.object = out.string(),
                                    .happened = fmt::format("the trained model takes {} MiB, and a file may have {}",
                                                            div_up(need, kMiB), file.rlim_cur / kMiB),
                                    .errno_value = EFBIG,
                                    .hint = "raise ulimit -f"});
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(trial_of_model(out).parent_path(), error);
  if (error || space.capacity == 0 || models * need <= space.available) return;  // some file systems do not count
  throw Error(Code::kDoesNotFit,
              {.object = out.string(),
               .happened = fmt::format("the trained model takes {} MiB{}, {} MiB are free", div_up(need, kMiB),
                                       models == 1 ? "" : " twice, while it is replaced", space.available / kMiB),
               .errno_value = ENOSPC,
               .hint = fmt::format("free some space, or name a directory on another drive in {}", option)});
}

}  // namespace

void check_room(const FinetuneOptions& options, const ModelDescription& model) {
  check_room(options.out, "--out", 1, model);
  check_room(options.evaluation.best, "--best", 2, model);
}

std::ofstream open_log(const std::filesystem::path& path) {
  std::ofstream log;
  if (path.empty()) return log;
  if (is_no_log(path)) {
    throw Error(Code::kInvalidArgument, {.object = path.string(),
                                         .happened = "is there, and is no log of a run",
                                         .errno_value = 0,
                                         .hint = "name another file in --log"});
  }
  log.open(path, std::ios::app);
  if (!log) {
    throw Error(Code::kIo, {.object = path.string(),
                            .happened = "cannot be opened for the log",
                            .errno_value = errno,
                            .hint = "check --log"});
  }
  return log;
}

}  // namespace spillway::models::finetune
