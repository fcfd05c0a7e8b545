#include "src/engine/device_update.h"

#include <algorithm>
#include <chrono>

#include "src/engine/tile_executor.h"
#include "swap/tile_arrays.h"

namespace spillway {

DeviceUpdate::DeviceUpdate(const Plan& plan, const ModelDescription& model, Device& device,
                           const GradientCollector& gradients, std::span<std::byte> host, Stream& stream, Watch watch)
    : plan_(plan), device_(device), gradients_(gradients), stream_(stream), watch_(watch) {
  std::size_t most = 0;
  for (const Block& block : model.blocks) most = std::max(most, block.parameters.size());
  ranges_.reserve(most);
  finite_ = reinterpret_cast<std::uint32_t*>(device.hbm().data() + plan.hbm.finite.offset);
  fetched_ = reinterpret_cast<std::uint32_t*>(host.data() + plan.host.overflow.offset);
}

void DeviceUpdate::run(const ParameterUpdates& parameters) {
  const auto start = std::chrono::steady_clock::now();
  // Any value but 0 is true; the kernels write 0 when a result is not finite.
  device_.fill_async(finite_, std::byte{1}, sizeof *finite_, stream_);
  std::uint64_t elements = 0;
  for (std::uint32_t t = 0; t < plan_.tiles.size(); ++t) {
    if (!plan_.tiles[t].range.trainable) continue;
    update(t, parameters);
    elements += plan_.tiles[t].range.count;
  }
  // The only wait of this update: after it the results are known, and the step may be reported.
  const bool finite = this->finite();
  const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  seconds_ += taken;
  if (elements > 0) element_seconds_ = taken / static_cast<double>(elements);
  if (finite) return;
  overflowed_ = true;
  throw update_overflow("the device update");
}

void DeviceUpdate::update(std::uint32_t t, const ParameterUpdates& parameters) {
  const TilePlace& place = plan_.tile_places[t];
  TileMemory memory;
  for (std::size_t part = 0; part < kParts; ++part) memory.part[part] = device_.hbm().data() + place.offset[part];
  const std::byte* gradient =
      gradients_.gradient(plan_.tiles[t].block) + plan_.tiles[t].gradient_first * size_of(place.shape.type);
  const StreamSpan span(watch_.timeline, {.kind = SpanKind::kUpdate, .subject = t}, stream_);
  std::uint64_t begin = 0;
  for (const GroupRange& range : parameters.ranges(t, ranges_)) {
    if (range.group != kNotUpdated) {
      device_.update_async(tile_arrays(place.shape, memory, gradient), parameters.scalars()[range.group], begin,
                           range.end, finite_, stream_);
    }
    begin = range.end;
  }
}

bool DeviceUpdate::finite() {
  device_.copy_async(CopyKind::kDeviceToHost, fetched_, finite_, sizeof *finite_, stream_);
  stream_.synchronize();
  return *fetched_ != 0;
}

}  // namespace spillway
