// Scratch files of the API for C.
#include <memory>
#include <mutex>
#include <span>

#include "spillway/c_api.h"
#include "src/c/c_handles.h"
#include "src/engine/scratch_files.h"

using namespace spillway;
using namespace spillway::c;

namespace {

spillway_status start_scratch(spillway_scratch* handle, IoOp op, uint32_t file, uint64_t offset, void* data,
                              uint64_t bytes, uint64_t* ticket) {
  return guarded([&] {
    const auto object = tables().scratches.find(handle);
    const auto turn = object->caller.enter(op == IoOp::kRead ? "scratch_read" : "scratch_write");
    *given(ticket, "ticket") =
        object->files->start(op, file, offset, {static_cast<std::byte*>(given(data, "data")), bytes});
  });
}

}  // namespace

spillway_status spillway_scratch_create(const spillway_config* config, spillway_scratch** scratch) {
  return guarded([&] {
    given(scratch, "scratch");
    const auto read = tables().configs.find(config);
    auto object = std::make_shared<ScratchObject>();
    object->files = std::make_unique<ScratchFiles>(read->config);
    *scratch = tables().scratches.add(std::move(object));
  });
}

spillway_status spillway_scratch_destroy(spillway_scratch* scratch) {
  return guarded([&] {
    if (scratch != nullptr) tables().scratches.take(scratch);
  });
}

uint32_t spillway_scratch_files(const spillway_scratch* scratch) {
  return answered(uint32_t{0}, [&] { return tables().scratches.find(scratch)->files->count(); });
}

spillway_status spillway_scratch_write(spillway_scratch* scratch, uint32_t file, uint64_t offset, const void* data,
                                       uint64_t bytes, uint64_t* ticket) {
  return start_scratch(scratch, IoOp::kWrite, file, offset, const_cast<void*>(data), bytes, ticket);
}

spillway_status spillway_scratch_read(spillway_scratch* scratch, uint32_t file, uint64_t offset, void* data,
                                      uint64_t bytes, uint64_t* ticket) {
  return start_scratch(scratch, IoOp::kRead, file, offset, data, bytes, ticket);
}

spillway_status spillway_scratch_wait(spillway_scratch* scratch, uint64_t ticket) {
  return guarded([&] {
    const auto object = tables().scratches.find(scratch);
    const auto turn = object->caller.enter("scratch_wait");
    object->files->wait(ticket);
  });
}

spillway_status spillway_scratch_moved(const spillway_scratch* scratch, uint64_t* read_bytes, uint64_t* written_bytes) {
  return guarded([&] {
    const IoStats stats = tables().scratches.find(scratch)->files->stats();
    *given(read_bytes, "read_bytes") = stats.read_bytes;
    *given(written_bytes, "written_bytes") = stats.write_bytes;
  });
}
