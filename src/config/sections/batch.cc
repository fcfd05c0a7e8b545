// Keys of no section.
#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr ConfigKey kBatchKeys[] = {
    K{"train_batch_size", kInteger, "", "rows per optimizer step, of all ranks: micro batch × accumulation × ranks",
      drafted<&D::train_batch>(
          [](const C& c) { return json_of(std::uint64_t{c.micro_batch} * c.gradient_accumulation); }),
      1, kMost32}
        .filled({always<"">, "micro batch × accumulation × ranks"}),
    K{"train_micro_batch_size_per_gpu", kInteger, "", "rows per forward pass of a rank; derived when missing",
      drafted<&D::micro_batch>([](const C& c) { return json_of(c.micro_batch); }), 1, kMost32}
        .filled({always<"">, "what the other two leave, else 8"}),
    K{"gradient_accumulation_steps", kInteger, "", "micro-batches per optimizer step of a rank; derived when missing",
      drafted<&D::accumulation>([](const C& c) { return json_of(c.gradient_accumulation); }), 1, kMost32}
        .filled({always<"">, "what the other two leave, else 1"}),
    K{"gradient_clipping", kNumber, "1", "largest global gradient norm; 0 switches clipping off",
      at<&C::gradient_clipping>, 0, 1e38}
        .filled({always<"1">, "the trainer's max_grad_norm, 1"}),
    K{"communication_data_type", kChoice, "\"fp32\"",
      "with several ranks: the type gradients are sent in; 16 bits, to which each rank rounds its sums, halve the "
      "bytes; in fp16 a rank's sum above 65504 becomes infinite: an overflow",
      at<&C::communication>}
        .allows(any_of<kDTypes>)
        .or_null(),
    {"dataloader_drop_last", kBool, "", "the loader of Python's initialize() gives whole batches only", kAsWritten},
};

}  // namespace

std::span<const ConfigKey> batch_keys() { return kBatchKeys; }

}  // namespace spillway
