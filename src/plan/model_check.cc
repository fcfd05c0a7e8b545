#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/formats/plain_file.h"
#include "src/formats/safetensors_header.h"
#include "src/plan/layout.h"

namespace spillway {
namespace {

constexpr std::uint64_t kMostMemory = 1024 * 1024 * kGiB;  // so that sums and products of a few stay inside 64 bits

[[noreturn]] void refuse_model(std::string object, std::string happened, const char* hint) {
  throw Error(Code::kInvalidArgument, {std::move(object), std::move(happened), 0, hint});
}

bool is_utf8(std::string_view text) {
  using Utf8 = rapidjson::UTF8<>;
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer, Utf8, Utf8, rapidjson::CrtAllocator, rapidjson::kWriteValidateEncodingFlag>
      writer(buffer);
  return writer.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

// They are written as files beside exported weights.
void check_attachments(const std::vector<Attachment>& attachments) {
  std::set<std::string_view> names;
  for (const Attachment& attachment : attachments) {
    const std::string object = "attachment \"" + printable(attachment.name) + "\"";
    const std::string_view name = attachment.name;
    if (!is_plain_file_name(name)) refuse_model(object, "is not a plain file name", "leave directories out");
    if (attachment.text.size() > kMostAttachmentBytes) {
      refuse_model(object, "has more than 64 MiB", "keep it in a file of your own");
    }
    if (!names.insert(name).second) refuse_model(object, "is given twice", "leave one out");
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") || name == "spillway.json") {
      refuse_model(object, "has the name of a file that is written beside it", "choose another name");
    }
  }
}

void check_bytes(const std::string& object, std::uint64_t bytes, std::uint64_t times = 1) {
  if (bytes <= kMostMemory / times) return;
  throw Error(Code::kDoesNotFit, {object, fmt::format("{} bytes, {} times", bytes, times), ENOMEM,
                                  "no machine has as much memory: look how they are computed"});
}

// What a configuration says of it; fp32 is what it means when it says nothing.
std::string key_of(DType type) { return std::string(type == DType::kFloat16 ? "fp16" : "bf16") + ".enabled"; }

}  // namespace

void check_weight_type(const ModelDescription& model, DType weights) {
  const std::vector<DType>& handled = model.weight_types;
  if (handled.empty() || std::ranges::find(handled, weights) != handled.end()) return;
  std::string names;
  for (const DType type : handled) names.append(names.empty() ? "" : ", ").append(name_of(type));
  const bool to_fp32 = handled[0] == DType::kFloat32;
  throw Error(Code::kUnsupported,
              {key_of(weights == DType::kFloat32 ? handled[0] : weights),
               fmt::format("weights are {} as it stands, and the program handles {} alone", name_of(weights), names), 0,
               to_fp32 ? "leave it out" : fmt::format("set {} to true, and no other type", key_of(handled[0]))});
}

void check_model(const ModelDescription& model) {
  check_attachments(model.attachments);
  check_activations(model);
  check_bytes("workspace_bytes", model.workspace_bytes);
  check_bytes("kept_host_bytes", model.kept_host_bytes);
  check_bytes("kept_nvme_bytes", model.kept_nvme_bytes);
  check_bytes("kept_moving_bytes", model.kept_moving_bytes);
  for (const Activation& activation : model.activations) check_bytes("an activation", activation.bytes);
  for (const Block& block : model.blocks) {
    check_bytes("inner activations of block " + printable(block.name), block.inside_bytes, model.micro_batches);
    for (const Parameter& parameter : block.parameters) {
      if (parameter.name.empty() || parameter.name == "__metadata__") {
        refuse_model("parameter \"" + parameter.name + "\"", "has a name that files of weights have no room for",
                     "choose another name");
      }
      if (is_utf8(parameter.name)) continue;
      refuse_model("parameter " + printable(parameter.name), "has a name that is not UTF-8",
                   "files of weights take no other");
    }
  }
}

}  // namespace spillway
