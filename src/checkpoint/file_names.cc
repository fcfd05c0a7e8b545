#include "src/checkpoint/file_names.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "spillway/error.h"
#include "src/formats/element_count.h"
#include "src/formats/json_tree.h"

namespace spillway {
namespace {

struct FileTensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::uint64_t first = 0, count = 0;
};
using ByParameter = std::map<std::string, std::vector<FileTensor>>;

[[noreturn]] void refuse_names(const std::string& what) {
  throw Error(Code::kCorrupt, {kFileNames, what, 0, "export from the program that trained the model"});
}

const std::vector<JsonValue>& list_in(const JsonValue* value) {
  if (!value || value->kind != JsonValue::Kind::kArray) refuse_names("is no list of tensors");
  return value->items;
}

const std::string& text_in(const JsonValue& value) {
  if (value.kind != JsonValue::Kind::kString || value.text.empty()) refuse_names("has a tensor without a name");
  return value.text;
}

std::uint64_t integer_in(const JsonValue& value) {
  if (value.kind != JsonValue::Kind::kNumber || !value.integer) refuse_names("has a tensor without a place");
  return *value.integer;
}

// ["in files", "in memory", first element, dimensions …]
void add_tensor(ByParameter& found, const JsonValue& value) {
  const auto& entry = list_in(&value);
  if (entry.size() < 3) refuse_names("has a tensor without a place");
  FileTensor tensor{.name = text_in(entry[0]), .shape = {}, .first = integer_in(entry[2])};
  for (std::size_t i = 3; i < entry.size(); ++i) tensor.shape.push_back(integer_in(entry[i]));
  tensor.count = count_elements(tensor.name, tensor.shape);
  found[text_in(entry[1])].push_back(std::move(tensor));
}

ByParameter parse_names(const std::string& attachment) {
  JsonValue root;
  if (parse_json(attachment, {.depth = 8, .values = attachment.size()}, root)) refuse_names("is not JSON");
  for (const JsonValue& name : list_in(root.member("unsaid"))) {
    throw Error(Code::kUnsupported,
                {text_in(name), "is in no file of this model as it is in memory, nor as pieces of that", 0,
                 "resume the run in Python, where engine.export() turns it back"});
  }
  ByParameter found;
  for (const JsonValue& tensor : list_in(root.member("tensors"))) add_tensor(found, tensor);
  for (auto& [name, tensors] : found) std::ranges::sort(tensors, {}, &FileTensor::first);
  return found;
}

// All of a parameter, each element once.
void check_whole(const Parameter& parameter, std::span<const FileTensor> tensors) {
  const std::uint64_t elements = count_elements(parameter.name, parameter.shape);
  std::uint64_t end = 0;
  for (const FileTensor& tensor : tensors) {
    if (tensor.first != end || tensor.count > elements - end)
      refuse_names("has not each value of " + parameter.name + " once");
    end += tensor.count;
  }
  if (end != elements) refuse_names("has not all of " + parameter.name);
}

}  // namespace

FileNames::FileNames(const ModelDescription& model) : model_(model) {
  const auto is_ours = [](const Attachment& attachment) { return attachment.name == kFileNames; };
  const auto attachment = std::ranges::find_if(model.attachments, is_ours);
  ByParameter renamed;
  if (attachment != model.attachments.end()) renamed = parse_names(attachment->text);
  std::erase_if(model_.attachments, is_ours);
  std::size_t used = 0;
  for (Block& block : model_.blocks) {
    std::vector<std::vector<Piece>> of_block;
    std::vector<Parameter> in_files;
    for (const Parameter& parameter : block.parameters) {
      std::vector<Piece>& pieces = of_block.emplace_back();
      const auto put = [&](Parameter in_file, std::uint64_t first) {
        const std::uint64_t count = count_elements(in_file.name, in_file.shape);
        pieces.push_back({first, count, static_cast<std::uint32_t>(in_files.size())});
        in_files.push_back(std::move(in_file));
      };
      const auto found = renamed.find(parameter.name);
      if (found == renamed.end()) {
        put(parameter, 0);
        continue;
      }
      ++used;
      check_whole(parameter, found->second);
      for (const FileTensor& tensor : found->second) {
        Parameter in_file = parameter;
        in_file.name = tensor.name;
        in_file.shape = tensor.shape;
        put(std::move(in_file), tensor.first);
      }
    }
    block.parameters = std::move(in_files);
    pieces_.push_back(std::move(of_block));
  }
  if (used != renamed.size()) refuse_names("names tensors that the model does not have");
}

void FileNames::write(std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<const float> values,
                      const WeightSink& sink) const {
  const std::vector<Piece>& pieces = pieces_[block][parameter];
  auto piece = std::ranges::upper_bound(pieces, first, {}, &Piece::first) - 1;
  for (; !values.empty(); ++piece) {
    const std::uint64_t inside = first - piece->first;
    const auto part = values.first(std::min<std::uint64_t>(values.size(), piece->count - inside));
    sink(block, piece->parameter, inside, part);
    first += part.size();
    values = values.subspan(part.size());
  }
}

}  // namespace spillway
