#include "src/comm/agreement.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "kernels/host_device.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::int32_t kNoBlock = -1;  // of the model: what is said is about no block of it
constexpr std::uint64_t kNobody = UINT64_MAX;

// An Error as bytes, for the ranks that it did not happen on.
class Letter {
 public:
  explicit Letter(std::string bytes = {}) : bytes_(std::move(bytes)) {}

  void put(std::uint64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void put(const std::string& text) {
    put(text.size());
    bytes_ += text;
  }
  std::uint64_t number() {
    std::uint64_t number = 0;
    SPILLWAY_CHECK(at_ + sizeof number <= bytes_.size(), "a letter is as long as it was written");
    std::memcpy(&number, bytes_.data() + at_, sizeof number);
    at_ += sizeof number;
    return number;
  }
  std::string text() {
    const std::uint64_t size = number();
    SPILLWAY_CHECK(size <= bytes_.size() - at_, "a letter is as long as it was written");
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

Letter letter_of(const Error& error) {
  const ErrorParts& parts = error.parts();
  Letter letter;
  letter.put(static_cast<std::uint64_t>(error.code()));
  letter.put(static_cast<std::uint64_t>(parts.errno_value));
  letter.put(static_cast<std::uint64_t>(parts.remedy));
  for (const std::string* text : {&parts.object, &parts.happened, &parts.hint, &parts.more}) letter.put(*text);
  letter.put(parts.values.size());
  for (const std::string& value : parts.values) letter.put(value);
  return letter;
}

Error error_in(Letter letter) {
  const auto code = static_cast<Code>(letter.number());
  ErrorParts parts;
  parts.errno_value = static_cast<int>(letter.number());
  parts.remedy = static_cast<Remedy>(letter.number());
  for (std::string* text : {&parts.object, &parts.happened, &parts.hint, &parts.more}) *text = letter.text();
  parts.values.resize(letter.number());
  for (std::string& value : parts.values) value = letter.text();
  return {code, std::move(parts)};
}

}  // namespace

Agreement::Agreement(Communicator* communicator)
    : communicator_(communicator && communicator->ranks() > 1 ? communicator : nullptr),
      rank_(communicator_ ? Rank{communicator_->rank(), communicator_->ranks()} : Rank{}) {
  if (!communicator_) return;
  workers_ = create_workers(1);
  device_ = create_host_device({.hbm_bytes = 4 * kKiB}, *workers_);
  stream_ = device_->create_stream("agreement");
}

void Agreement::finish() {
  stream_->synchronize();
  communicator_->throw_if_failed();
}

// As many at a time as a call takes.
template <typename Value>
void Agreement::fold_all(std::span<Value> values, Fold fold) {
  for (std::size_t at = 0; communicator_ && at < values.size(); at += kMostScalars) {
    communicator_->all_reduce(values.subspan(at, std::min(kMostScalars, values.size() - at)), fold, kNoBlock, *stream_);
    finish();
  }
}

void Agreement::fold(std::span<std::uint64_t> values, Fold fold) { fold_all(values, fold); }
void Agreement::fold(std::span<double> values, Fold fold) { fold_all(values, fold); }

void Agreement::broadcast(std::span<std::byte> bytes, std::uint32_t root) {
  if (!communicator_) return;
  communicator_->broadcast(bytes, root, kNoBlock, *stream_);
  finish();
}

std::string Agreement::same(std::string text, std::uint32_t root) {
  std::uint64_t size[] = {rank_.index == root ? text.size() : 0};
  fold(std::span(size), Fold::kMax);
  text.resize(size[0]);
  broadcast(std::as_writable_bytes(std::span(text)), root);
  return text;
}

std::vector<std::uint64_t> Agreement::gather(std::uint64_t value) {
  std::vector<std::uint64_t> values(rank_.count);
  values[rank_.index] = value;
  if (!communicator_) return values;
  const std::vector<std::uint64_t> slices(rank_.count, sizeof(std::uint64_t));
  communicator_->all_gather(std::as_writable_bytes(std::span(values)), slices, kNoBlock, *stream_);
  finish();
  return values;
}

std::optional<Error> Agreement::failure_of(const std::function<void()>& work) const {
  try {
    work();
  } catch (const Error& error) {
    communicator_->throw_if_failed();  // who cannot be told need not be
    return error;
  } catch (const std::exception& error) {
    return Error(Code::kIo, {"rank", error.what(), 0, ""});
  }
  return std::nullopt;
}

// Rank 0's is what a rank alone would say. Of another it has to be said whose it is.
void Agreement::tell(const std::optional<Error>& failure) {
  if (alone()) {
    if (failure) throw Error(*failure);
    return;
  }
  std::uint64_t first[1] = {failure ? rank_.index : kNobody};
  fold(std::span(first), Fold::kMin);
  if (first[0] == kNobody) return;
  const auto root = static_cast<std::uint32_t>(first[0]);
  Error error = error_in(Letter(same(rank_.index == root ? letter_of(*failure).bytes() : "", root)));
  if (root == 0) throw error;
  ErrorParts parts = error.parts();
  parts.object = fmt::format("rank {}: {}", root, parts.object);
  throw Error(error.code(), std::move(parts));
}

}  // namespace spillway
