#include "src/checkpoint/deepspeed_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/checkpoint/deepspeed_info.h"
#include "src/formats/element_count.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"
#include "src/formats/stored_elements.h"

namespace spillway {
namespace {

using Kind = PickleValue::Kind;

constexpr std::uint64_t kComparedBytes = 256 * kKiB;
constexpr const char* kAgain = "save the checkpoint again, or copy all of it";

std::string path_of(const TorchArchive& archive) { return archive.path().string(); }

// Dicts with many members, to be looked up in one by one.
std::map<std::uint64_t, const PickleValue*> by_number(const PickleValue& dict) {
  std::map<std::uint64_t, const PickleValue*> members;
  for (std::size_t i = 0; i < dict.items.size(); i += 2) {
    if (const auto key = dict.items[i]->unsigned_integer()) members[*key] = dict.items[i + 1];
  }
  return members;
}

std::map<std::string_view, const PickleValue*> by_name(const PickleValue& dict) {
  std::map<std::string_view, const PickleValue*> members;
  for (std::size_t i = 0; i < dict.items.size(); i += 2) {
    if (dict.items[i]->is(Kind::kText)) members[dict.items[i]->text] = dict.items[i + 1];
  }
  return members;
}

// Of the ranks: a number, or one for each group of parameters.
std::uint64_t partition_count(const PickleValue& zero, const std::string& object) {
  const PickleValue* count = zero.find("partition_count");
  std::uint64_t most = whole_number(count).value_or(0);
  if (count && count->is(Kind::kList)) {
    for (const PickleValue* of_group : count->items) most = std::max(most, whole_number(of_group).value_or(0));
  }
  if (most == 0) refuse(object, "does not say over how many ranks the states are spread", kAgain);
  return most;
}

// How many elements lie between parameter `p` of a group and the next one, which zero_optimization.parameter_alignment
// begins at a multiple of 16 bytes.
std::uint64_t padding_behind(const PickleValue* paddings, std::size_t group, std::size_t p, const std::string& object) {
  if (!paddings) return 0;  // stage 3, and DeepSpeed before 0.19.8
  const auto item = [](const PickleValue* list, std::size_t i) {
    return list && list->is(Kind::kList) && i < list->items.size() ? list->items[i] : nullptr;
  };
  const std::optional<std::uint64_t> padding = whole_number(item(item(paddings, group), p));
  if (!padding) refuse(object, "does not say how far apart all parameters lie", kAgain);
  return *padding;
}

const char* name_of(DeepSpeedArray array) {
  constexpr const char* kNames[] = {"master weights", "exp_avg", "exp_avg_sq"};
  return kNames[static_cast<std::size_t>(array)];
}

// A member of ZeroStageEnum: Python 3.11 pickles its name, other versions its value.
std::optional<std::uint64_t> stage_of(const PickleValue* value) {
  if (!value || !value->is(Kind::kObject) || value->items[1]->items.size() != 2) return whole_number(value);
  constexpr std::string_view kNames[] = {"disabled", "optimizer_states", "gradients", "weights"};
  const PickleValue& name = *value->items[1]->items[1];
  const auto found = name.is(Kind::kText) ? std::ranges::find(kNames, name.text) : std::end(kNames);
  if (found == std::end(kNames)) return std::nullopt;
  return static_cast<std::uint64_t>(found - std::begin(kNames));
}

}  // namespace

DeepSpeedCheckpoint::DeepSpeedCheckpoint(const std::filesystem::path& directory, const std::string& tag, bool checked)
    : checked_(checked), layout_(find_deepspeed_files(directory, tag)) {
  facts_.tag = layout_.tag;
  if (layout_.says_bf16) facts_.weights = DType::kBFloat16;
  facts_.ranks = static_cast<std::uint32_t>(layout_.state_files.size());
  models_.push_back(opened(layout_.model_files[0]));
  for (std::size_t rank = 0; rank < facts_.ranks; ++rank) {
    states_.push_back(opened(layout_.state_files[rank]));
    if (rank == 0) read_model_state(models_[0]->root());
    read_states(rank);
  }
  for (std::size_t g = 0; g < facts_.sub_groups; ++g) check_sizes(groups_[g]);
  read_frozen(models_[0]->root());
  facts_.parameters = parameters_.size();
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    facts_.elements += parameters_[p].elements;
    if (!by_name_.emplace(parameters_[p].name, p).second)
      refuse(path_of(*models_[0]), fmt::format("has two parameters {}", printable(parameters_[p].name)), kAgain);
  }
}

std::unique_ptr<TorchArchive> DeepSpeedCheckpoint::opened(const std::filesystem::path& path) const {
  return std::make_unique<TorchArchive>(TorchArchive::open(path, checked_));
}

void DeepSpeedCheckpoint::read_model_state(const PickleValue& root) {
  const std::string object = path_of(*models_[0]);
  add_engine_info(root, object, facts_);
  const PickleValue& zero = member(states_[0]->root(), "optimizer_state_dict", Kind::kDict, path_of(*states_[0]));
  const bool flat_partitions = zero.find("single_partition_of_fp32_groups") != nullptr;
  // BF16_Optimizer, of stage 1, does not say its stage.
  facts_.stage = static_cast<std::uint32_t>(stage_of(zero.find("zero_stage")).value_or(flat_partitions ? 1 : 0));
  if (facts_.stage < 1 || facts_.stage > 3)
    refuse(path_of(*states_[0]), "is of no ZeRO stage from 1 to 3", "import a checkpoint that ZeRO wrote");
  const std::size_t models = layout_.model_files.size();
  if (facts_.stage == 3 && models != facts_.ranks) {
    refuse(layout_.directory.string(),
           fmt::format("has model states of {} ranks and optimizer states of {}, none of rank {} (…_{}_states.pt)",
                       models, facts_.ranks, std::min<std::size_t>(models, facts_.ranks),
                       models < facts_.ranks ? "model" : "optim"),
           "copy the files of all ranks into one directory");
  }
  read_parameters(root, zero.find("param_alignment_paddings"));
  const PickleValue* shared = root.find("shared_params");
  for (std::size_t i = 0; shared && shared->is(Kind::kDict) && i < shared->items.size(); i += 2) {
    const PickleValue &other = *shared->items[i], &name = *shared->items[i + 1];
    if (other.is(Kind::kText) && name.is(Kind::kText)) shared_.emplace(other.text, name.text);
  }
}

void DeepSpeedCheckpoint::read_parameters(const PickleValue& root, const PickleValue* paddings) {
  const std::string object = path_of(*models_[0]);
  const PickleValue& groups = member(root, "param_shapes", Kind::kList, object);
  facts_.sub_groups = groups.items.size();
  groups_.resize(groups.items.size());
  for (std::size_t g = 0; g < groups.items.size(); ++g) {
    const PickleValue& shapes = *groups.items[g];
    if (!shapes.is(Kind::kDict)) refuse(object, "has a `param_shapes` that names no parameters", kAgain);
    groups_[g].even = facts_.stage == 3;
    groups_[g].name = fmt::format("group {}", g);
    groups_[g].ranks.resize(facts_.ranks);
    std::uint64_t offset = 0;
    for (std::size_t i = 0; i < shapes.items.size(); i += 2) {
      if (!shapes.items[i]->is(Kind::kText)) refuse(object, "has a parameter without a name", kAgain);
      const std::string name(shapes.items[i]->text);
      const std::string subject = fmt::format("{}: {}", object, printable(name));
      std::vector<std::uint64_t> shape = torch_shape(*shapes.items[i + 1], subject);
      const std::uint64_t elements = count_elements(subject, shape);
      parameters_.push_back(
          {.name = name, .shape = std::move(shape), .elements = elements, .group = g, .offset = offset});
      offset += facts_.stage == 3 ? div_up(elements, std::uint64_t{facts_.ranks})
                                  : elements + padding_behind(paddings, g, i / 2, path_of(*states_[0]));
      if (offset > std::uint64_t{1} << 55) refuse(object, "has more than 2^55 elements", kAgain);
    }
    groups_[g].elements = offset;
  }
}

// Weights that were not trained: each a group of its own. Stage 3 cuts them up as it does the others; below it, all
// ranks have them whole, and stage 1 in the module alone.
void DeepSpeedCheckpoint::read_frozen(const PickleValue& root) {
  const PickleValue* shapes = root.find("frozen_param_shapes");
  const bool even = facts_.stage == 3;
  if (!shapes || !shapes->is(Kind::kDict)) {
    const PickleValue* module = root.find("module");
    if (!even && module && module->is(Kind::kDict)) module_ = by_name(*module);
    return;
  }
  if (shapes->items.empty()) return;
  for (std::size_t rank = 1; even && rank < facts_.ranks; ++rank) models_.push_back(opened(layout_.model_files[rank]));
  std::vector<std::map<std::string_view, const PickleValue*>> fragments;
  for (const auto& model : models_)
    fragments.push_back(by_name(member(model->root(), "frozen_param_fragments", Kind::kDict, path_of(*model))));
  for (std::size_t i = 0; i < shapes->items.size(); i += 2) {
    const std::string name(shapes->items[i]->text), object = path_of(*models_[0]) + ": " + printable(name);
    std::vector<std::uint64_t> shape = torch_shape(*shapes->items[i + 1], object);
    const std::uint64_t elements = count_elements(object, shape);
    Group& group = add_frozen(name, std::move(shape), elements);
    for (std::size_t rank = 0; rank < models_.size(); ++rank) {
      const auto fragment = fragments[rank].find(name);
      if (fragment == fragments[rank].end()) refuse(object, "is frozen, and its values are not there", kAgain);
      auto& arrays = group.ranks.emplace_back();
      arrays[0] = flat(*models_[rank], *fragment->second, name);
      if (arrays[0].elements != (even ? div_up(elements, std::uint64_t{facts_.ranks}) : elements))
        refuse(object, fmt::format("is frozen, and {} of its values are there", arrays[0].elements), kAgain);
    }
  }
}

DeepSpeedCheckpoint::Group& DeepSpeedCheckpoint::add_frozen(const std::string& name, std::vector<std::uint64_t> shape,
                                                            std::uint64_t elements) {
  parameters_.push_back({.name = name,
                         .shape = std::move(shape),
                         .elements = elements,
                         .frozen = true,
                         .group = groups_.size(),
                         .offset = 0});
  Group& group = groups_.emplace_back();
  group.even = facts_.stage == 3;
  group.partition = elements;
  group.name = printable(name);
  return group;
}

void DeepSpeedCheckpoint::take_frozen(const std::string& name) {
  const auto found = module_.find(name);
  if (found == module_.end() || find(name)) return;
  Flat whole = flat(*models_[0], *found->second, name);
  add_frozen(name, whole.tensor.shape, whole.elements).ranks.emplace_back()[0] = std::move(whole);
  by_name_.emplace(name, parameters_.size() - 1);
  ++facts_.parameters;
  facts_.elements += parameters_.back().elements;
}

void DeepSpeedCheckpoint::read_states(std::size_t rank) {
  const std::string object = path_of(*states_[rank]);
  const PickleValue& zero = member(states_[rank]->root(), "optimizer_state_dict", Kind::kDict, object);
  if (const std::uint64_t count = partition_count(zero, object); count != facts_.ranks) {
    refuse(object, fmt::format("is of a run of {} ranks, and the files of {} are there", count, facts_.ranks),
           "copy the files of all ranks, and of no other run, into one directory");
  }
  const bool stage3 = facts_.stage == 3;
  const PickleValue& masters =
      member(zero, stage3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups", Kind::kList, object);
  const PickleValue* base_found = zero.find(stage3 ? "optimizer_state_dict" : "base_optimizer_state");
  if (!base_found) {
    refuse(object, "has the fp32 weights, but no states of the optimizer",
           "begin with the weights (zero_to_fp32.py) alone");
  }
  if (!base_found->is(Kind::kDict))
    refuse(object, "was saved with elastic_checkpoint", "save it with elastic_checkpoint set to false");
  const PickleValue& states = member(*base_found, "state", Kind::kDict, object);
  if (rank == 0) add_optimizer_info(zero, *base_found, facts_);
  if (masters.items.size() != facts_.sub_groups || states.items.size() != 2 * facts_.sub_groups) {
    refuse(object,
           fmt::format("has {} flat tensors and the optimizer's states of {}, for {} groups of parameters",
                       masters.items.size(), states.items.size() / 2, facts_.sub_groups),
           states.items.empty() ? "no step was made; begin with the model instead" : kAgain);
  }
  const auto numbered = by_number(states);
  for (std::size_t g = 0; g < facts_.sub_groups; ++g) {
    const auto state = numbered.find(g);
    if (state == numbered.end() || !state->second->is(Kind::kDict))
      refuse(object, fmt::format("has no optimizer states of group {}", g), kAgain);
    read_group(rank, g, *masters.items[g], *state->second);
  }
}

void DeepSpeedCheckpoint::read_group(std::size_t rank, std::size_t group, const PickleValue& master,
                                     const PickleValue& state) {
  TorchArchive& archive = *states_[rank];
  const std::string object = fmt::format("{}: group {}", path_of(archive), group);
  auto& arrays = groups_[group].ranks[rank];
  arrays[0] = flat(archive, master, fmt::format("fp32 weights of group {}", group));
  for (std::size_t i = 0; i < state.items.size(); i += 2) {
    const PickleValue& key = *state.items[i];
    if (key.is(Kind::kText) && (key.text == "step" || key.text == "exp_avg" || key.text == "exp_avg_sq")) continue;
    refuse(object, fmt::format("has states `{}`", key.is(Kind::kText) ? printable(key.text) : "without a name"),
           "Adam's exp_avg and exp_avg_sq alone are imported (without amsgrad)");
  }
  for (const auto& [array, name] : {std::pair(1, "exp_avg"), std::pair(2, "exp_avg_sq")}) {
    const PickleValue* found = state.find(name);
    if (!found) refuse(object, fmt::format("has no {}", name), "Adam's states alone are imported");
    arrays[static_cast<std::size_t>(array)] = flat(archive, *found, fmt::format("{} of group {}", name, group));
  }
  const PickleValue* step = state.find("step");
  std::optional<std::uint64_t> steps = whole_number(step);
  if (const auto tensor = step ? archive.tensor(*step, "step") : std::nullopt; tensor && tensor->elements == 1) {
    float value = -1;
    archive.read(*tensor, 0, std::span(&value, 1));
    if (value >= 0 && value < 0x1p24f) steps = static_cast<std::uint64_t>(value);
  }
  if (!steps || *steps > kMostSteps) refuse(object, "does not say how many steps Adam has made", kAgain);
  if (rank == 0) groups_[group].updates = *steps;
  if (*steps != groups_[group].updates) {
    refuse(object, fmt::format("has made {} steps, and {} on rank 0", *steps, groups_[group].updates),
           "copy the files of all ranks, and of no other run, into one directory");
  }
  facts_.optimizer_steps = std::max(facts_.optimizer_steps, *steps);
}

DeepSpeedCheckpoint::Flat DeepSpeedCheckpoint::flat(TorchArchive& archive, const PickleValue& value,
                                                    const std::string& name) {
  std::optional<TorchTensor> tensor = archive.tensor(value, name);
  if (!tensor) refuse(fmt::format("{}: {}", path_of(archive), printable(name)), "is no tensor", kAgain);
  Flat flat;
  flat.archive = &archive;
  flat.elements = tensor->elements;
  flat.tensor = std::move(*tensor);
  return flat;
}

// A tensor that is empty in the archive, because DeepSpeed had it on NVMe.
void DeepSpeedCheckpoint::open_swap(Flat& flat, const std::string& name, std::size_t rank, std::uint64_t elements) {
  const std::string object = fmt::format("{}: {}", path_of(*flat.archive), name);
  const PickleValue* id = flat.tensor.attributes ? flat.tensor.attributes->find("ds_id") : nullptr;
  if (!id || !id->is(Kind::kText) || !is_plain_file_name(std::string(id->text))) {
    refuse(object,
           fmt::format("is empty: DeepSpeed kept its {} elements elsewhere, and the file does not say where", elements),
           "save the checkpoint again, without offload_optimizer to nvme");
  }
  const std::filesystem::path path =
      layout_.directory / "offloaded_tensors" / fmt::format("rank{:02}", rank) / fmt::format("{}.tensor.swp", id->text);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw Error(
        Code::kNotFound,
        {path.string(), fmt::format("is not there; it has {}, {} elements that DeepSpeed kept on NVMe", name, elements),
         0, "copy the checkpoint's offloaded_tensors, too; without them the states are lost"});
  }
  flat.swap = PlainFile::open_to_read(path);
  const std::uint64_t size = flat.swap.size_bytes(), bytes = elements * size_of(flat.tensor.type);
  // Written in whole units of 1,024 bytes for each thread of aio.intra_op_parallelism.
  if (size < bytes || size - bytes >= kMiB) {
    refuse(path.string(), fmt::format("has {} bytes, not the {} of {}", size, bytes, name),
           "DeepSpeed may have lost part of it; take an earlier checkpoint");
  }
  flat.elements = elements;
  ++facts_.swapped;
}

// What all ranks have of a group is what its parameters need.
void DeepSpeedCheckpoint::check_sizes(Group& group) {
  const std::uint64_t ranks = group.ranks.size();
  group.partition = group.even ? group.elements : group.ranks[0][1].elements;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::uint64_t before = group.even ? 0 : std::min(group.elements, rank * group.partition);
    const std::uint64_t needed = std::min(group.elements - before, group.partition);
    for (std::size_t a = 0; a < kArrays; ++a) {
      Flat& flat = group.ranks[rank][a];
      const std::string name = fmt::format("{} of {}", name_of(static_cast<DeepSpeedArray>(a)), group.name);
      if (group.even && flat.elements == 0 && needed > 0) open_swap(flat, name, rank, needed);
      const bool exact = group.even || a > 0;  // else a rank may have dropped its padding
      if (exact ? flat.elements == group.partition : flat.elements >= needed) continue;
      refuse(fmt::format("{}: {}", path_of(*flat.archive), name),
             fmt::format("has {} elements, the parameters' shapes ask for {}", flat.elements, needed), kAgain);
    }
  }
  if (group.even) return;
  const std::uint64_t there = ranks * group.partition, most = align_up(group.elements, 2 * ranks) + 2 * ranks;
  if (there >= group.elements && there <= most) return;
  refuse(fmt::format("{}: {}", layout_.directory.string(), group.name),
         fmt::format("has {} elements on {} ranks, its parameters {}", there, ranks, group.elements), kAgain);
}

const DeepSpeedParameter* DeepSpeedCheckpoint::find(const std::string& name) const {
  auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    const auto other = shared_.find(name);
    if (other != shared_.end()) found = by_name_.find(other->second);
  }
  return found == by_name_.end() ? nullptr : &parameters_[found->second];
}

DeepSpeedCheckpoint::FlatRange DeepSpeedCheckpoint::place(const DeepSpeedParameter& parameter,
                                                          std::uint64_t element) const {
  const Group& group = groups_[parameter.group];
  if (group.even) {
    const std::uint64_t part = div_up(parameter.elements, std::uint64_t{group.ranks.size()});
    return {element / part, parameter.offset + element % part, part - element % part};
  }
  const std::uint64_t at = parameter.offset + element;
  return {at / group.partition, at % group.partition, group.partition - at % group.partition};
}

void DeepSpeedCheckpoint::read(const DeepSpeedParameter& parameter, DeepSpeedArray array, std::uint64_t first,
                               std::span<float> out) {
  SPILLWAY_CHECK(!parameter.frozen || array == DeepSpeedArray::kMaster, "frozen parameters have weights alone");
  while (!out.empty()) {
    const FlatRange at = place(parameter, first);
    Flat& flat = groups_[parameter.group].ranks[at.rank][static_cast<std::size_t>(array)];
    const std::uint64_t size = size_of(flat.tensor.type);
    const auto part = out.first(std::min<std::uint64_t>({out.size(), at.count, kComparedBytes / size}));
    if (flat.swap.is_open()) {
      piece_.resize(kComparedBytes);
      const auto bytes = std::span(piece_).first(part.size() * size);
      flat.swap.read_at(at.index * size, bytes);
      widen(bytes, flat.tensor.type, part);
    } else {
      flat.archive->read(flat.tensor, at.index, part);
    }
    first += part.size();
    out = out.subspan(part.size());
  }
}

// Each entry of an archive once, however many flat tensors lie in it.
std::map<std::pair<TorchArchive*, std::uint64_t>, const DeepSpeedCheckpoint::Flat*> DeepSpeedCheckpoint::stored()
    const {
  std::map<std::pair<TorchArchive*, std::uint64_t>, const Flat*> entries;
  for (const Group& group : groups_) {
    for (const auto& arrays : group.ranks) {
      for (const Flat& flat : arrays) {
        if (flat.archive && !flat.swap.is_open()) entries.emplace(std::pair(flat.archive, flat.tensor.entry), &flat);
      }
    }
  }
  return entries;
}

std::uint64_t DeepSpeedCheckpoint::stored_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [entry, flat] : stored()) bytes += flat->archive->entry_bytes(flat->tensor);
  return bytes;
}

void DeepSpeedCheckpoint::verify(const std::function<void(std::uint64_t)>& on_bytes) {
  for (const auto& [entry, flat] : stored()) flat->archive->verify(flat->tensor, on_bytes);
}

}  // namespace spillway
