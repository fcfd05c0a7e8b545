#include "swap/store_shape.h"

#include "spillway/stripe_map.h"
#include "spillway/units.h"

namespace spillway {

RecordForm record_form(const StoreShape& shape) {
  return {.fingerprint = shape.identity.fingerprint, .tiles = shape.tiles.size(), .parameters = shape.parameters};
}

StoreGeometry store_geometry(const StoreShape& shape, const RecordForm& form) {
  return {.description_bytes = align_up(shape.identity.description.size() + 1, kExtentAlignment),
          .record_bytes = record_bytes(form),
          .scratch_bytes = shape.scratch_bytes,
          .slots = shape.slots};
}

std::uint64_t space_bytes(const StoreShape& shape) {
  return lay_out_store(shape.tiles, store_geometry(shape, record_form(shape))).total_bytes;
}

std::uint64_t disk_bytes(const StoreShape& shape, std::size_t paths) { return disk_bytes(space_bytes(shape), paths); }

std::uint64_t disk_bytes(std::uint64_t total_bytes, std::size_t paths) {
  const std::uint64_t space =
      // Every file has a header of its own, and a last stripe unit may be cut in any of them.
      paths == 1 ? total_bytes : align_up(total_bytes - kExtentAlignment, kStripeUnitBytes) + paths * kExtentAlignment;
  return space + paths * kExtentAlignment;  // the second superblocks
}

}  // namespace spillway
