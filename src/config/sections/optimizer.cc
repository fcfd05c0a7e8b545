// Section "optimizer".
#include "src/config/place.h"

namespace spillway {
namespace {

using namespace key_rows;

constexpr std::string_view kAdam = "AdamW|Adam";

constexpr ConfigKey kOptimizerKeys[] = {
    {"optimizer", kSection, "", "the optimizer"},
    K{"optimizer.type",
      kChoice,
      "\"AdamW\"",
      "Adam is decoupled (AdamW) too, unless adam_w_mode is false",
      {[](D& d, const V& v) { d.optimizer_type = v.integer; },
       [](const C& c) {
         const bool adam_w = c.optimizer.kind == OptimizerKind::kAdam && c.optimizer.decoupled_decay;
         return json_string(adam_w ? "AdamW" : name_of(c.optimizer.kind));
       }}}
        .allows(any_of<kOptimizerTypes>, "Lamb|Muon|OneBitAdam|ZeroOneAdam|OneBitLamb|MuAdam|MuAdamW|MuSGD",
                // deepspeed 0.19.6, runtime/engine.py, _configure_basic_optimizer; 0.19.8 has none of them any more.
                "OneBitAdam|ZeroOneAdam|OneBitLamb"),
    {"optimizer.params", kSection, "", "the optimizer's hyper-parameters"},
    K{"optimizer.params.lr", kNumber, "1e-3", "learning rate; Adagrad: 1e-2 when missing",
      drafted<&D::learning_rate>([](const C& c) { return json_of(c.optimizer.learning_rate); })}
        .filled({[](const A&) { return json_of(kTrainerRate); }, "the trainer's learning_rate, 5e-5"}),
    K{"optimizer.params.betas",
      kPair,
      "[0.9, 0.999]",
      "decay rates of the two moments",
      {[](D& d, const V& v) {
         d.config.optimizer.beta1 = v.number;
         d.config.optimizer.beta2 = v.second;
       },
       [](const C& c) { return pair_of(c.optimizer.beta1, c.optimizer.beta2); }}}
        .below(1)
        .only_of("AdamW|Adam|Lion")
        .filled({always<"[0.9, 0.999]">, "the trainer's adam_beta1 and 2, [0.9, 0.999]"}),
    K{"optimizer.params.eps", kNumber, "1e-8", "added to the denominator; Adagrad: 1e-10 when missing",
      drafted<&D::epsilon>([](const C& c) { return json_of(c.optimizer.epsilon); })}
        .only_of("AdamW|Adam|Adagrad")
        .filled({always<"1e-8">, "the trainer's adam_epsilon, 1e-8"}),
    K{"optimizer.params.weight_decay", kNumber, "0",
      "weight decay, for every parameter that no group excepts; 0.01 when missing beside torch_adam",
      drafted<&D::weight_decay>([](const C& c) { return json_of(c.optimizer.weight_decay); })}
        .filled({always<"0">, "the trainer's weight_decay, 0"}),
    K{"optimizer.params.bias_correction", kBool, "true", "Adam's correction of the first steps' moments",
      at<&C::optimizer, &OptimizerConfig::bias_correction>}
        .only_of(kAdam),
    K{"optimizer.params.adam_w_mode", kBool, "true", "type Adam: decoupled weight decay; false: L2",
      drafted<&D::adam_w_mode>([](const C& c) { return json_of(c.optimizer.decoupled_decay); })}
        .only_of(kAdam),
    K{"optimizer.params.torch_adam", kBool, "",
      "the default of weight_decay is that of PyTorch's AdamW, 0.01, unless adam_w_mode is false",
      drafted<&D::torch_adam>()}
        .only_of(kAdam),
    K{"optimizer.params.momentum", kNumber, "0", "share of the last step's direction that goes on",
      at<&C::optimizer, &OptimizerConfig::momentum>}
        .below(1)
        .only_of("SGD"),
    K{"optimizer.params.dampening", kNumber, "0", "share of the gradient that momentum leaves out",
      at<&C::optimizer, &OptimizerConfig::dampening>, 0, 1}
        .only_of("SGD"),
    K{"optimizer.params.nesterov", kBool, "false", "Nesterov's momentum", at<&C::optimizer, &OptimizerConfig::nesterov>}
        .only_of("SGD"),
};

}  // namespace

std::span<const ConfigKey> optimizer_keys() { return kOptimizerKeys; }

}  // namespace spillway
