#include "tools/models/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <string_view>
#include <unordered_set>

#include "spillway/bf16.h"
#include "spillway/config_type.h"
#include "spillway/error.h"
#include "spillway/fp16.h"

namespace spillway::models {
namespace {

constexpr std::string_view kHead = "lm_head.weight";

// What the names of all tensors but the head's begin with: `transformer.` of a GPT-2, `model.` of most others. Files of
// a model without its head leave it out.
std::string_view prefix_of(const ModelDescription& model) {
  const std::string_view first = model.blocks.at(0).parameters.at(0).name;
  return first.substr(0, first.find('.') + 1);
}

std::string_view without(std::string_view prefix, std::string_view name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// Constants that older versions of transformers saved: `h.7.attn.bias`, `h.7.attn.masked_bias`, and
// `layers.7.self_attn.rotary_emb.inv_freq`. Without the prefix.
bool is_buffer(std::string_view name) {
  if (name == "rotary_emb.inv_freq" || name.ends_with(".rotary_emb.inv_freq")) return true;
  if (!name.starts_with("h.")) return false;
  name.remove_prefix(2);
  const auto digits = std::min(name.find_first_not_of("0123456789"), name.size());
  name.remove_prefix(digits);
  return digits > 0 && (name == ".attn.bias" || name == ".attn.masked_bias");
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (const auto extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

[[noreturn]] void refuse(const std::filesystem::path& file, std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument,
              {.object = file.string(), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

std::filesystem::path main_file(const std::filesystem::path& directory) {
  const auto single = directory / "model.safetensors", index = directory / "model.safetensors.index.json";
  return std::filesystem::exists(single) || !std::filesystem::exists(index) ? single : index;
}

}  // namespace

ModelWeights::ModelWeights(const std::filesystem::path& directory, const ModelDescription& model)
    : reader_(SafetensorsReader::open(directory)) {
  const std::string_view prefix = prefix_of(model);
  std::unordered_set<const TensorEntry*> used;
  for (const auto& block : model.blocks) {
    auto& entries = entries_.emplace_back();
    for (const auto& parameter : block.parameters) {
      const TensorEntry* entry = reader_.find(parameter.name);
      if (entry == nullptr) entry = reader_.find(without(prefix, parameter.name));
      if (entry == nullptr) {
        refuse(main_file(directory), fmt::format("tensor {} is missing", without(prefix, parameter.name)),
               "config.json and weights must belong to the same model");
      }
      if (entry->shape != parameter.shape) {
        refuse(reader_.file(*entry),
               fmt::format("tensor {} has shape {}, config.json asks for {}", entry->name, shape_text(entry->shape),
                           shape_text(parameter.shape)),
               "config.json and weights must belong to the same model");
      }
      if (!entry->type) {
        refuse(reader_.file(*entry), fmt::format("tensor {} is of type {}", entry->name, entry->dtype),
               "F32, BF16 and F16 are read");
      }
      entries.push_back(entry);
      used.insert(entry);
    }
  }
  for (const auto& entry : reader_.tensors()) {
    if (used.contains(&entry) || is_buffer(without(prefix, entry.name))) continue;
    // Of a model whose head is the token embedding.
    const TensorEntry& tokens = *entries_[0][0];
    if (entry.name == kHead && entry.shape == tokens.shape && entry.type) {
      tied_head_ = &entry;
      continue;
    }
    refuse(reader_.file(entry), fmt::format("tensor {} is no part of the model that config.json describes", entry.name),
           "config.json and weights must belong to the same model");
  }
}

void ModelWeights::check(DType type) {
  const auto stays_finite = [type](float value) {
    if (type == DType::kFloat16) return std::isfinite(value) && fits_fp16(value);
    if (type == DType::kBFloat16)
      return std::isfinite(value) && std::isfinite(bf16_to_float(split_master(value).weight));
    return std::isfinite(value);
  };
  std::vector<float> values(64 * 1024);
  for (const auto& block : entries_) {
    for (const TensorEntry* entry : block) {
      for (std::uint64_t at = 0; at < entry->elements; at += values.size()) {
        const auto piece = std::span(values).first(std::min<std::uint64_t>(values.size(), entry->elements - at));
        reader_.read(*entry, at, piece);
        const auto bad = std::ranges::find_if_not(piece, stays_finite);
        if (bad == piece.end()) continue;
        if (std::isfinite(*bad)) {
          const bool half = type == DType::kFloat16;
          refuse(reader_.file(*entry),
                 fmt::format("tensor {} holds {}, and {}", entry->name, *bad,
                             half ? "fp16 ends at 65,504" : "bf16 ends at 3.39e38"),
                 half ? "train it in bf16 or fp32" : "train it in fp32");
        }
        const std::uint64_t index = at + static_cast<std::uint64_t>(bad - piece.begin());
        refuse(reader_.file(*entry),
               fmt::format("tensor {} holds {} at index {}, before any training", entry->name,
                           std::isnan(*bad) ? "NaN"
                           : *bad < 0       ? "-Inf"
                                            : "Inf",
                           index),
               "the file is damaged, or what made it failed: take another one");
      }
    }
  }
  check_tied_head();
}

void ModelWeights::check_tied_head() {
  if (tied_head_ == nullptr) return;
  const TensorEntry& tokens = *entries_[0][0];
  std::vector<float> head(64 * 1024), table(head.size());
  for (std::uint64_t at = 0; at < tokens.elements; at += head.size()) {
    const auto count = std::min<std::uint64_t>(head.size(), tokens.elements - at);
    reader_.read(*tied_head_, at, std::span(head).first(count));
    reader_.read(tokens, at, std::span(table).first(count));
    // As numbers: the embedding is known to have no NaN.
    const auto other = std::ranges::mismatch(std::span(head).first(count), std::span(table).first(count));
    if (other.in1 == std::span(head).first(count).end()) continue;
    refuse(reader_.file(*tied_head_),
           fmt::format("tensor {} is not {}, with which config.json ties it: they differ at index {}", kHead,
                       tokens.name, at + static_cast<std::uint64_t>(other.in2 - std::span(table).begin())),
           "say \"tie_word_embeddings\": false in config.json, where the family can, or take the tensor out");
  }
}

WeightSource ModelWeights::source() {
  return [this](std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<float> out) {
    reader_.read(*entries_[block][parameter], first, out);
  };
}

void write_attachments(const ModelDescription& model, const std::filesystem::path& directory, DType type) {
  for (const auto& attachment : model.attachments) {
    const auto path = directory / attachment.name;
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << (attachment.name == "config.json" ? with_type(attachment.text, type) : attachment.text);
    file.close();
    if (!file) {
      throw Error(Code::kIo, {.object = path.string(),
                              .happened = "cannot be written",
                              .errno_value = errno,
                              .hint = "check the directory and the space that is left"});
    }
  }
}

}  // namespace spillway::models
