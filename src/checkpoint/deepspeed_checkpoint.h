// The values of a DeepSpeed ZeRO checkpoint, parameter by parameter. Every rank keeps flat tensors, one for each group
// of parameters and array; a parameter is put together from the ranks:
//
//   stage 3       parameter p is cut into equal parts, the last one padded;    rank 0 │ a0 │ b0 │   rank 1 │ a1 │ b1 ~│
//                 a rank's flat tensor has its part of each, in order
//   stages 1, 2   all parameters one after the other (with `param_alignment_  rank 0 │ a  │ b │    rank 1 │ b │ c ~│
//                 paddings` apart), cut into equal parts, the last one padded
//
// The order of parameters is that of `param_shapes` (deepspeed/utils/zero_to_fp32.py, 0.19). A flat tensor that was on
// NVMe is empty in the checkpoint and has an attribute `ds_id`: the values are in
// offloaded_tensors/rankRR/DS_ID.tensor.swp, raw (deepspeed/runtime/swap_tensor/optimizer_utils.py).
//
// Thread: one. Errors: kInvalidArgument, kCorrupt, kNotFound, kIo.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/import.h"
#include "src/checkpoint/deepspeed_layout.h"
#include "src/formats/plain_file.h"
#include "src/formats/torch_archive.h"

namespace spillway {

enum class DeepSpeedArray : std::uint8_t { kMaster, kExpAvg, kExpAvgSq };

struct DeepSpeedParameter {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::uint64_t elements = 0;
  bool frozen = false;       // has a master alone: the weights, in their own type
  std::size_t group = 0;     // of flat tensors
  std::uint64_t offset = 0;  // in them: stage 3, in a rank's; stages 1 and 2, in all ranks' one after the other
};

class DeepSpeedCheckpoint {
 public:
  // Reads and checks everything but the values: that the flat tensors of all ranks are there, of the sizes that the
  // parameters' shapes ask for. `checked`: files that match their CRC-32s; verify() looks at the values.
  DeepSpeedCheckpoint(const std::filesystem::path& directory, const std::string& tag, bool checked);

  const DeepSpeedInfo& facts() const { return facts_; }
  const std::filesystem::path& directory() const { return layout_.directory; }
  std::span<const DeepSpeedParameter> parameters() const { return parameters_; }
  // How many updates Adam has made of a parameter that is trained: its state has a count for each group.
  std::uint64_t updates(const DeepSpeedParameter& parameter) const { return groups_[parameter.group].updates; }
  // Null when there is none of that name, nor one that shares its storage with it.
  const DeepSpeedParameter* find(const std::string& name) const;
  // Makes one that is not trained a parameter, if the checkpoint has it in the module alone, as stage 1 does. Only who
  // asks knows which: the trained ones are there as well, buffers, and other names. Pointers to parameters end.
  void take_frozen(const std::string& name);

  // Elements [first, first + out.size()) of a parameter, row-major.
  void read(const DeepSpeedParameter& parameter, DeepSpeedArray array, std::uint64_t first, std::span<float> out);

  std::uint64_t stored_bytes() const;  // that verify() reads
  // Compares all values that have a checksum (those that were on NVMe have none) with it.
  void verify(const std::function<void(std::uint64_t)>& on_bytes);

 private:
  static constexpr std::size_t kArrays = 3;
  // A rank's flat tensor: in an archive, or in a swap file.
  struct Flat {
    TorchArchive* archive = nullptr;
    TorchTensor tensor;
    PlainFile swap;
    std::uint64_t elements = 0;
  };
  struct Group {
    bool even = false;            // stage 3's way
    std::uint64_t elements = 0;   // of its parameters, and between them; stage 3: of their parts on one rank
    std::uint64_t partition = 0;  // elements of a rank's flat tensor
    std::uint64_t updates = 0;    // that Adam has made, on every rank
    std::vector<std::array<Flat, kArrays>> ranks = {};
    std::string name = {};  // in messages
  };
  struct FlatRange {
    std::size_t rank = 0;
    std::uint64_t index = 0;  // in its flat tensor
    std::uint64_t count = 0;  // of elements that follow there
  };

  std::unique_ptr<TorchArchive> opened(const std::filesystem::path& path) const;
  void read_model_state(const PickleValue& root);
  void read_parameters(const PickleValue& root, const PickleValue* paddings);
  void read_frozen(const PickleValue& root);
  Group& add_frozen(const std::string& name, std::vector<std::uint64_t> shape, std::uint64_t elements);
  void read_states(std::size_t rank);
  void read_group(std::size_t rank, std::size_t group, const PickleValue& master, const PickleValue& state);
  Flat flat(TorchArchive& archive, const PickleValue& value, const std::string& name);
  void open_swap(Flat& flat, const std::string& name, std::size_t rank, std::uint64_t elements);
  void check_sizes(Group& group);
  FlatRange place(const DeepSpeedParameter& parameter, std::uint64_t element) const;
  std::map<std::pair<TorchArchive*, std::uint64_t>, const Flat*> stored() const;

  const bool checked_;
  const DeepSpeedLayout layout_;
  DeepSpeedInfo facts_;
  std::vector<std::unique_ptr<TorchArchive>> models_, states_;  // by rank
  std::vector<DeepSpeedParameter> parameters_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  std::map<std::string, std::string, std::less<>> shared_;  // other names of parameters
  std::map<std::string_view, const PickleValue*> module_;   // where frozen parameters are nowhere else
  std::vector<Group> groups_;
  std::vector<std::byte> piece_;
};

}  // namespace spillway
