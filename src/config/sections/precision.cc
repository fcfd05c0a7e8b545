// Sections "bf16", "fp16" and "data_types".
#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr ConfigKey kPrecisionKeys[] = {
    {"bf16", kSection, "", "bfloat16 training"},
    K{"bf16.enabled", kBool, "false", "weights and gradients in bf16, with an exact fp32 master; false: fp32",
      drafted<&D::bf16>([](const C& c) { return json_of(c.weights == DType::kBFloat16); })}
        .filled({always<"false">, "the trainer's bf16, false"}),
    K{"bfloat16", kSection, "", "older word for bf16"}.now("bf16"),
    K{"bfloat16.enabled", kBool, "false", "older word for bf16.enabled", drafted<&D::bf16>()}
        .now("bf16.enabled")
        .filled({always<"false">, "the trainer's bf16, false"}),
    {"fp16", kSection, "", "half precision training, with a scaled loss"},
    K{"fp16.enabled", kBool, "false", "weights and gradients in fp16, with an fp32 master",
      drafted<&D::fp16>([](const C& c) { return json_of(c.weights == DType::kFloat16); })}
        .filled({always<"false">, "the trainer's fp16, false"}),
    {"fp16.loss_scale", kNumber, "0", "what the loss is multiplied with, best a power of two; 0: dynamic",
     at<&C::loss_scale, &LossScaleConfig::fixed>, 0, 0x1p64},
    {"fp16.initial_scale_power", kInteger, "16", "a dynamic scale begins with 2 to the power of this",
     at<&C::loss_scale, &LossScaleConfig::initial_power>, 0, kMostScalePower},
    {"fp16.loss_scale_window", kInteger, "1000", "steps without an overflow after which a dynamic scale is doubled",
     at<&C::loss_scale, &LossScaleConfig::window>, 1},
    {"fp16.hysteresis", kInteger, "2", "overflows until a dynamic scale is halved",
     at<&C::loss_scale, &LossScaleConfig::hysteresis>, 1, kMost32},
    {"fp16.consecutive_hysteresis", kBool, "false", "every step without an overflow makes the hysteresis whole again",
     at<&C::loss_scale, &LossScaleConfig::consecutive_hysteresis>},
    {"fp16.min_loss_scale", kNumber, "1", "the smallest dynamic scale; an overflow there ends the run",
     at<&C::loss_scale, &LossScaleConfig::least>, 1e-6, 0x1p64},
    {"data_types", kSection, "", "types beside bf16 and fp16"},
    K{"data_types.param_dtype",
      kChoice,
      "",
      "the type of weights once more, as bf16.enabled and fp16.enabled say it",
      {[](D& d, const V& v) { d.param_dtype = static_cast<DType>(v.integer / 2); }}}
        .allows("fp32|float32|bf16|bfloat16|fp16|float16")
        .or_null(),
};

}  // namespace

std::span<const ConfigKey> precision_keys() { return kPrecisionKeys; }

}  // namespace spillway
