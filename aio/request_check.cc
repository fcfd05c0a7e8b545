#include "aio/request_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "spillway/error.h"

namespace spillway {
namespace {

[[noreturn]] void refuse_region(std::span<const std::byte> region, std::string why, const char* hint) {
  throw Error(Code::kInvalidArgument,
              {fmt::format("region of {} bytes at {}", region.size(), static_cast<const void*>(region.data())),
               std::move(why), 0, hint});
}

}  // namespace

const char* refusal(const IoRequest& request, std::span<File* const> files, const StripeMap* stripes) {
  const bool striped = request.file == kStripedSpace;
  if (request.op > IoOp::kSync || request.priority > IoPriority::kNormal) return "no such operation or priority";
  if (striped ? stripes == nullptr : request.file >= files.size() || files[request.file] == nullptr)
    return "no such file in this queue";
  if (striped && request.op != IoOp::kSync && request.offset < stripes->header_bytes())
    return "the striped space starts after the files' headers";
  if (request.op == IoOp::kSync)
    return request.bytes == 0 && request.buffer == nullptr ? nullptr : "a sync moves no bytes";
  if (request.bytes == 0 || request.buffer == nullptr) return "a transfer needs bytes and a buffer";
  constexpr std::uint64_t kLast = std::numeric_limits<std::int64_t>::max();
  if (request.bytes > kLast || request.offset > kLast - request.bytes) return "offset out of range";
  if (request.least_bytes != 0 && (request.op != IoOp::kRead || striped || request.least_bytes > request.bytes))
    return "least_bytes is a part of a read of one file";
  const auto address = reinterpret_cast<std::uintptr_t>(request.buffer);
  for (const File* file : striped ? files.first(stripes->files()) : files.subspan(request.file, 1)) {
    if ((request.offset | request.bytes) % file->alignment() != 0)
      return "offset and length must be multiples of File::alignment()";
    if (address % file->memory_alignment() != 0) return "the address must be a multiple of File::memory_alignment()";
  }
  return nullptr;
}

void check_place(const File& file, std::uint32_t index, std::uint32_t places) {
  if (index < places) return;
  throw Error(Code::kInvalidArgument,
              {file.path().string(), fmt::format("the I/O queue has no place for it beside its {} files", index), 0,
               "raise max_files, or remove a file"});
}

void check_leaves(std::uint32_t index, std::span<File* const> files, const StripeMap* stripes) {
  if (index >= files.size() || files[index] == nullptr) {
    throw Error(Code::kInvalidArgument,
                {fmt::format("file {}", index), "is none of the I/O queue's", 0, "name one that was added"});
  }
  if (stripes != nullptr && index < stripes->files()) {
    throw Error(Code::kInvalidArgument,
                {files[index]->path().string(), "is a part of the striped space", 0, "it stays as long as the queue"});
  }
}

void check_region(std::span<const std::byte> region, std::span<const std::span<std::byte>> there, std::uint32_t most) {
  if (region.empty() || region.data() == nullptr) refuse_region(region, "is empty", "give it bytes");
  for (const std::span<std::byte> other : there) {
    if (region.data() < other.data() + other.size() && other.data() < region.data() + region.size())
      refuse_region(region, "overlaps a region that the I/O queue has", "remove that first");
  }
  if (there.size() >= most) {
    refuse_region(region, fmt::format("the I/O queue has no place for it beside its {} regions", there.size()),
                  "raise max_regions, or remove a region");
  }
}

std::ptrdiff_t region_at(const std::byte* begin, std::span<const std::span<std::byte>> there) {
  const auto found = std::ranges::find_if(there, [&](const auto& each) { return each.data() == begin; });
  if (found == there.end()) {
    throw Error(Code::kInvalidArgument, {fmt::format("region at {}", static_cast<const void*>(begin)),
                                         "is none of the I/O queue's", 0, "name the first byte of one that was added"});
  }
  return found - there.begin();
}

}  // namespace spillway
