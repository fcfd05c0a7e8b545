#include "tools/generate/key_cache.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/terminal/amount.h"

namespace spillway::models::generate {
namespace {

constexpr std::uint64_t kPage = 4096;

std::uint64_t read_of(std::uint32_t layer) { return std::uint64_t{2} * layer; }
std::uint64_t write_of(std::uint32_t layer) { return std::uint64_t{2} * layer + 1; }

}  // namespace

KeyCache::KeyCache(const CacheOptions& options, const Shape& shape, std::uint32_t layers)
    : tier_(options.tier),
      directory_(options.directory),
      positions_(shape.sequence),
      row_bytes_(std::uint64_t{2} * shape.kv_heads() * shape.head_width() * size_of(shape.type)),
      layers_(layers),
      pending_(std::size_t{2} * layers) {}

// The kernel writes to the memory of a transfer, whatever has become of it.
KeyCache::~KeyCache() {
  try {
    for (std::uint64_t tag = 0; tag < pending_.size(); ++tag) wait_for(tag);
  } catch (const Error&) {  // nobody reads it any more
  }
}

std::uint64_t KeyCache::host_bytes() const {
  if (tier_ == Placement::kHbm) return 0;
  return layer_bytes() * (tier_ == Placement::kNvme ? std::min<std::uint32_t>(2, layers_) : layers_);
}

std::string KeyCache::describe() const {
  const char* const where = tier_ == Placement::kHbm ? "HBM" : tier_ == Placement::kHost ? "host memory" : "a file";
  return fmt::format("keys and values of {} tokens: {} in {}", positions_,
                     terminal::text_of_size(layer_bytes() * layers_), where);
}

void KeyCache::attach(Ops& ops, std::byte* device) {
  ops_ = &ops;
  device_ = device;
  if (tier_ == Placement::kHbm) return;
  const std::span<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kPage, host_bytes())), host_bytes());
  host_.reset(memory.data());
  if (host_ == nullptr) throw std::bad_alloc();
  ops.register_host(memory);
  if (tier_ != Placement::kNvme) return;
  std::error_code ignored;
  std::filesystem::create_directories(directory_, ignored);
  const std::filesystem::path name = directory_ / fmt::format(".spillway-keys-{}", ::getpid());
  file_.emplace(File::open(name, {.writable = true, .create = true}));
  std::filesystem::remove(name, ignored);  // it goes with this process, however that ends
  file_->preallocate(nvme_bytes());
  File* const files[] = {&*file_};
  queue_ = IoQueue::create({}, files, {&memory, 1});
}

std::byte* KeyCache::begin(std::uint32_t layer, std::uint32_t past, Stream& stream) {
  std::byte* const rows = device_ + (tier_ == Placement::kHbm ? layer * layer_bytes() : 0);
  if (tier_ == Placement::kHbm) return rows;
  if (tier_ == Placement::kNvme) {
    if (past > 0 && layer == 0 && !pending_[read_of(0)]) read_ahead(0, past);
    wait_for(read_of(layer));
  }
  if (past > 0) ops_->upload(host_layer(layer), rows, past * row_bytes_, stream);
  if (tier_ == Placement::kNvme && past > 0 && layer + 1 < layers_) read_ahead(layer + 1, past);
  return rows;
}

void KeyCache::end(std::uint32_t layer, std::uint32_t past, std::uint32_t count, Stream& stream) {
  if (tier_ == Placement::kHbm) return;
  std::byte* const host = host_layer(layer);
  const std::uint64_t first = past * row_bytes_, bytes = count * row_bytes_;
  if (tier_ == Placement::kNvme) free_buffer(layer);
  ops_->download(device_ + first, host + first, bytes, stream);
  if (tier_ != Placement::kNvme) return;
  stream.synchronize();
  // Whole pages: the rows in front of the new ones are in memory, for they were read.
  const std::uint64_t from = align_down(first, kPage), to = align_up(first + bytes, kPage);
  pending_[write_of(layer)] = true;
  queue_->submit({.op = IoOp::kWrite,
                  .offset = layer * layer_bytes() + from,
                  .buffer = host + from,
                  .bytes = to - from,
                  .tag = write_of(layer)});
}

// Layers take turns in two buffers: what was in this one is on the drive then.
void KeyCache::free_buffer(std::uint32_t layer) {
  for (std::uint32_t other = layer % 2; other < layers_; other += 2) wait_for(write_of(other));
}

void KeyCache::read_ahead(std::uint32_t layer, std::uint32_t past) {
  free_buffer(layer);
  pending_[read_of(layer)] = true;
  queue_->submit({.op = IoOp::kRead,
                  .priority = IoPriority::kUrgent,
                  .offset = layer * layer_bytes(),
                  .buffer = host_layer(layer),
                  .bytes = align_up(past * row_bytes_, kPage),
                  .tag = read_of(layer)});
}

void KeyCache::wait_for(std::uint64_t tag) {
  while (pending_[tag]) {
    IoCompletion done[8];
    for (const IoCompletion& completion : queue_->wait(done, -1)) {
      pending_[completion.tag] = false;
      if (completion.error == 0) continue;
      throw transfer_error(completion.tag % 2 == 0 ? IoOp::kRead : IoOp::kWrite, *file_, completion,
                           {"check the drive, or keep the cache elsewhere with --cache"});
    }
  }
}

}  // namespace spillway::models::generate
