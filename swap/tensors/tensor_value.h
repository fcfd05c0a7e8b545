// A tensor as it was put once, under its name: a later put under the same name makes another value. Who uses a value
// and where it lies is noted here and guarded by the store's mutex (tensor_store_impl.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "swap/tensors/tensor_table.h"
#include "swap/tensors/tensor_transfer.h"

namespace spillway {

struct TensorValue {
  std::string name;
  TensorRecord record;  // without parts while it is not on NVMe, or on its way there

  // Where it is in the memory of one tier.
  using Turn = std::tuple<int, std::uint64_t, std::uint64_t>;
  struct Held {
    std::optional<Extent> at;
    unsigned pins = 0;
    bool awaited = false;           // it was fetched ahead, and not used yet
    std::optional<Turn> turn = {};  // in the order in which tensors leave
  };
  Held host, hbm;
  bool on_nvme = false;     // all of record.parts is written
  bool checked = true;      // host memory has the bytes that were put
  bool filling = false;     // they are being copied to where it will be
  bool relocating = false;  // they are being copied from HBM down, or up; where it was it stays
  bool rising = false;      // it will come to HBM, or is coming
  std::shared_ptr<TensorTransfer> transfer;

  bool named = true;       // it is what its name stands for
  bool committed = false;  // in the newest commit
  unsigned users = 0;      // threads that read its memory or its parts

  std::uint64_t last_use = 0;
  std::optional<std::uint64_t> next_use;

  bool stays() const { return filling || relocating || users > 0; }
  bool busy() const { return stays() || transfer; }
  bool in_host() const { return host.at && !(transfer && transfer->op() == IoOp::kRead); }
  bool in_hbm() const { return hbm.at && !filling; }
  bool unwritten() const { return host.at && !on_nvme && !transfer && !filling; }

  // Smaller ones leave first: what a tier above has, too, the least recently used, then those whose next use is known,
  // the last one first, then those that were fetched for a use which is still to come. No two have one number of
  // `last_use`.
  Turn turn(const Held& held) const {
    if (&held == &host && hbm.at) return {-1, last_use, 0};
    if (held.awaited) return {2, last_use, 0};
    return next_use ? Turn{1, ~*next_use, last_use} : Turn{0, last_use, 0};
  }
};

}  // namespace spillway
