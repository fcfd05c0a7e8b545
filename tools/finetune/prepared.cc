#include "tools/finetune/prepared.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <utility>

#include "spillway/error.h"
#include "tools/finetune/sha256.h"
#include "tools/models/config_json.h"
#include "tools/models/ops/ops.h"
#include "tools/terminal/byte_bar.h"

namespace spillway::models::finetune {
namespace {

constexpr const char* kAgain = "prepare the data again, with `python -m spillway.prepare`";
constexpr const char* kWanted = "name the directory that `python -m spillway.prepare` made, whole";
constexpr std::uint64_t kMostHeaderBytes = 64 << 20;
constexpr double kVersion = 1;
constexpr double kMostRows = 0x1p32, kMostTokens = 0x1p53;  // beyond, a number in JSON is not exact

std::uint64_t whole(const ConfigJson& header, const char* key, double least, double most) {
  if (!header.has(key)) header.refuse(fmt::format("\"{}\" is missing", key));
  const double value = header.number(key, 0);
  if (value != std::floor(value) || value < least || value > most) {
    header.refuse(fmt::format("\"{}\" is not a whole number from {:.0f} to {:.0f}", key, least, most));
  }
  return static_cast<std::uint64_t>(value);
}

std::string sha256_of(const ReadFile& file, const std::function<void(std::uint64_t done)>& progress = {}) {
  Sha256 sum;
  std::vector<unsigned char> chunk(std::min<std::uint64_t>(file.size(), 1 << 20));
  for (std::uint64_t at = 0; at < file.size(); at += chunk.size()) {
    if (progress) progress(at);
    const auto part = std::span(chunk).first(std::min<std::uint64_t>(chunk.size(), file.size() - at));
    file.read(at, part);
    sum.add(part);
  }
  return sum.finish();
}

bool bit(const std::vector<unsigned char>& bits, std::size_t at) { return (bits[at / 8] >> at % 8 & 1) != 0; }

}  // namespace

PreparedData::PreparedData(const std::filesystem::path& directory, std::uint32_t vocabulary, Verify verify)
    : vocabulary_(vocabulary),
      header_(header_of(directory, vocabulary)),
      tokens_(directory / "tokens.bin", kWanted),
      starts_(directory / "starts.bin", kWanted),
      targets_(directory / "targets.bin", kWanted) {
  const std::size_t token_bytes = header_.sequence * header_.token_bytes, bit_bytes = (header_.sequence + 7) / 8;
  check(tokens_, token_bytes, header_.tokens_sha256, verify);
  check(starts_, bit_bytes, header_.starts_sha256, verify);
  check(targets_, bit_bytes, header_.targets_sha256, verify);
  token_bytes_.resize(token_bytes);  // only now, when files as long are known to be there
  start_bits_.resize(bit_bytes);
  target_bits_.resize(bit_bytes);
}

PreparedData::Header PreparedData::header_of(const std::filesystem::path& directory, std::uint32_t vocabulary) {
  const ReadFile file(directory / "header.json", kWanted);
  if (file.size() > kMostHeaderBytes) {
    throw Error(Code::kInvalidArgument, {.object = file.path().string(),
                                         .happened = fmt::format("is larger than {} bytes", kMostHeaderBytes),
                                         .errno_value = 0,
                                         .hint = kWanted});
  }
  std::string text(file.size(), '\0');
  file.read(0, {reinterpret_cast<unsigned char*>(text.data()), text.size()});
  const ConfigJson json(text, file.path().string(), kAgain);
  if (json.text("format", "") != "spillway-prepared") json.refuse("is not the header of prepared data", kWanted);
  const auto version = whole(json, "version", 1, kMostRows);
  if (version != kVersion) {
    json.refuse(fmt::format("is of format version {}, and this program reads version {:.0f}", version, kVersion),
                "prepare the data with the `python -m spillway.prepare` of this version");
  }
  Header header;
  header.rows = whole(json, "rows", 1, kMostRows);
  header.sequence = static_cast<std::uint32_t>(whole(json, "tokens_per_row", 2, kLargestSize));
  header.documents = whole(json, "documents", 1, kMostTokens);
  header.pieces = json.has("pieces") ? whole(json, "pieces", 1, kMostTokens) : header.documents;
  header.targets = whole(json, "targets", 1, kMostTokens);
  const std::string dtype = json.text("dtype", "");
  if (dtype != "uint16" && dtype != "uint32") json.refuse("\"dtype\" is neither \"uint16\" nor \"uint32\"");
  header.token_bytes = dtype == "uint16" ? 2 : 4;
  const auto largest = whole(json, "largest_token", 0, kMostRows);
  if (largest >= vocabulary) {
    json.refuse(fmt::format("token {} is outside the model's vocabulary of {}", largest, vocabulary),
                "prepare the data with the model's own tokenizer: `python -m spillway.prepare --model`");
  }
  header.tokens_sha256 = json.text("tokens_sha256", "");
  header.starts_sha256 = json.text("starts_sha256", "");
  header.targets_sha256 = json.text("targets_sha256", "");
  const ConfigJson tokenizer = json.section("tokenizer"), files = tokenizer.section("sha256");
  header.tokenizer = tokenizer.text("name", "");
  for (const char* name : kVocabularies) {
    if (files.has(name)) header.vocabularies.emplace_back(name, files.text(name, ""));
  }
  header.mark =
      fmt::format("{} rows of {} tokens, {:016x}", header.rows, header.sequence, XXH3_64bits(text.data(), text.size()));
  return header;
}

void PreparedData::check(const ReadFile& file, std::uint64_t bytes_of_row, const std::string& sha256,
                         Verify verify) const {
  const std::uint64_t wanted = header_.rows * bytes_of_row;
  const auto corrupt = [&](std::string happened) {
    throw Error(Code::kCorrupt,
                {.object = file.path().string(), .happened = std::move(happened), .errno_value = 0, .hint = kAgain});
  };
  if (file.size() != wanted) {
    corrupt(fmt::format("holds {} bytes, and {} rows of {} tokens take {}", file.size(), header_.rows, header_.sequence,
                        wanted));
  }
  if (verify == Verify::kSizes) return;
  terminal::ByteBar bar(fmt::format("checking {}", file.path().string()));
  const std::string found = sha256_of(file, [&](std::uint64_t done) { bar.at(done, wanted); });
  bar.clear();
  if (found != sha256) {
    corrupt(fmt::format("has the sha256 {}, and header.json says {}", found, sha256));
  }
}

void PreparedData::check_tokenizer(const std::filesystem::path& model) const {
  for (const auto& [name, sha256] : header_.vocabularies) {
    const std::filesystem::path own = model / name;
    std::error_code none;
    if (!std::filesystem::exists(own, none)) continue;
    if (sha256_of(ReadFile(own, "it must stay readable while it is compared")) == sha256) continue;
    throw Error(Code::kInvalidArgument,
                {.object = tokens_.path().parent_path().string(),
                 .happened = fmt::format("was made with another tokenizer (\"{}\"): {} is not the same file",
                                         header_.tokenizer, own.string()),
                 .errno_value = 0,
                 .hint = "prepare the data with the model's own: `python -m spillway.prepare --model`"});
  }
}

void PreparedData::refuse(const ReadFile& file, std::uint64_t row, std::uint64_t position, std::string what) const {
  throw Error(Code::kCorrupt, {.object = file.path().string(),
                               .happened = fmt::format("row {}, position {}: {}", row, position, what),
                               .errno_value = 0,
                               .hint = kAgain});
}

std::uint32_t PreparedData::row_length_of(const std::filesystem::path& directory) {
  return header_of(directory, UINT32_MAX).sequence;
}

std::uint64_t PreparedData::targets_of(std::uint64_t row) {
  targets_.read(row % header_.rows * target_bits_.size(), target_bits_);
  std::uint64_t count = 0;
  for (const unsigned char bits : target_bits_) count += static_cast<std::uint64_t>(std::popcount(bits));
  return count;
}

void PreparedData::read_row(std::uint64_t row, const Row& out) {
  const std::size_t count = header_.sequence;
  SPILLWAY_CHECK(out.tokens.size() == count && out.starts.size() == count && out.targets.size() == count,
                 "a row is as long as the header says");
  row %= header_.rows;
  tokens_.read(row * token_bytes_.size(), token_bytes_);
  starts_.read(row * start_bits_.size(), start_bits_);
  targets_.read(row * target_bits_.size(), target_bits_);
  const unsigned char* bytes = token_bytes_.data();
  for (std::size_t i = 0; i < count; ++i, bytes += header_.token_bytes) {
    std::uint32_t token = bytes[0] | std::uint32_t{bytes[1]} << 8;
    if (header_.token_bytes == 4) token |= std::uint32_t{bytes[2]} << 16 | std::uint32_t{bytes[3]} << 24;
    if (token >= vocabulary_) {
      refuse(tokens_, row, i, fmt::format("token {} is outside the model's vocabulary of {}", token, vocabulary_));
    }
    out.tokens[i] = token;
  }
  if (!bit(start_bits_, 0)) refuse(starts_, row, 0, "no document begins there");
  for (std::size_t i = 0; i < count; ++i) {
    const bool ends = i + 1 == count || bit(start_bits_, i + 1), has_target = bit(target_bits_, i);
    if (has_target && ends) refuse(targets_, row, i, "the last token of a document has a target");
    out.starts[i] = bit(start_bits_, i) ? static_cast<std::uint32_t>(i) : out.starts[i - 1];
    out.targets[i] = has_target ? out.tokens[i + 1] : kNoTarget;
    if (has_target && out.starts[i] > 0 && !packed()) {
      refuse(targets_, row, i,
             "a second document of the row has a target, and header.json has no more pieces than rows");
    }
  }
}

}  // namespace spillway::models::finetune
