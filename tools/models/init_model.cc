#include "tools/models/init_model.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "spillway/error.h"
#include "spillway/safetensors.h"
#include "tools/models/splitmix.h"
#include "tools/models/weights.h"

namespace spillway::models {
namespace {

// ln(x) for x > 0, about 1e-15. The C library's log is not the same on all machines. With x = m * 2^e, m near 1:
// ln(m) = 2 (s + s^3/3 + s^5/5 + …), s = (m - 1) / (m + 1).
double natural_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // exact
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return 2 * s * sum + exponent * 0.69314718055994531;
}

// Values that are drawn side by side, and a thread's least share of them.
constexpr std::size_t kBatch = 1 << 22, kShare = 1 << 16;

// out[i] = spread * normal_of(origin + i). A value follows from its counter alone, so threads change no bit.
void draw(std::span<float> out, std::uint64_t origin, double spread) {
  const std::size_t threads = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t share = std::max(kShare, (out.size() + threads - 1) / threads);
  std::vector<std::future<void>> drawn;
  for (std::size_t first = 0; first < out.size(); first += share) {
    const std::span<float> part = out.subspan(first, std::min(share, out.size() - first));
    // Where there can be no more threads, a part is drawn when it is waited for.
    drawn.push_back(std::async([part, from = origin + first, spread] {
      for (std::size_t i = 0; i < part.size(); ++i) part[i] = static_cast<float>(spread * normal_of(from + i));
    }));
  }
  for (auto& part : drawn) part.get();
}

}  // namespace

std::span<const Preset> presets() {
  static constexpr Preset kPresets[] = {
      {"gpt2", 12, 768, 12}, {"gpt2-medium", 24, 1024, 16}, {"gpt2-large", 36, 1280, 20}, {"gpt2-xl", 48, 1600, 25}};
  return kPresets;
}

// Inverse of the normal distribution function, algorithm AS 241, PPND7 (Wichura 1988), good to 7 digits.
double normal_of(std::uint64_t counter) {
  const double p = (static_cast<double>(mix(counter) >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  }
  double r = std::sqrt(-natural_log(q < 0 ? p : 1 - p)), value = 0;
  if (r <= 5) {
    r -= 1.6;
    value = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
            ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  } else {
    r -= 5;
    value = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
            ((0.012258202635 * r + 0.24197894225) * r + 1.0);
  }
  return q < 0 ? -value : value;
}

std::uint64_t init_model(const std::filesystem::path& directory, ModelConfig config, std::uint64_t seed, DType type,
                         const std::function<bool()>& stop) {
  config.text = model_config_text(config, type);
  return init_model(directory, trained_gpt2(config), seed, type, stop);
}

std::uint64_t init_model(const std::filesystem::path& directory, const TrainedModel& trained, std::uint64_t seed,
                         DType type, const std::function<bool()>& stop) {
  const ModelDescription& model = trained.description;
  std::vector<TensorSpec> tensors;
  for (const auto& block : model.blocks) {
    for (const auto& parameter : block.parameters) tensors.push_back({parameter.name, parameter.shape});
  }
  auto writer = SafetensorsWriter::create(directory, tensors, {.type = type});
  for (const Attachment& attachment : model.attachments) {  // of a model in another format
    std::error_code ignored;
    if (std::filesystem::exists(std::filesystem::symlink_status(directory / attachment.name, ignored)))
      throw Error(Code::kExists,
                  {(directory / attachment.name).string(), "is there", 0, "name another directory, or remove it"});
  }
  std::vector<float> values(kBatch);
  std::uint64_t total = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::string& name = tensors[t].name;
    const bool bias = name.ends_with(".bias"), norm = !bias && tensors[t].shape.size() == 1;
    const bool projection = name.ends_with("c_proj.weight");
    const double spread = projection ? 0.02 / std::sqrt(2.0 * static_cast<double>(trained.layers.size())) : 0.02;
    std::uint64_t count = 1;
    for (const auto extent : tensors[t].shape) count *= extent;
    // Every tensor counts from a place of its own, so that its values do not depend on the other tensors' sizes.
    const std::uint64_t origin = mix(seed) ^ mix(~t);
    for (std::uint64_t first = 0; first < count; first += kBatch) {
      const auto batch = std::span(values).first(std::min<std::uint64_t>(kBatch, count - first));
      if (norm || bias)
        std::ranges::fill(batch, bias ? 0.0f : 1.0f - trained.norm_offset);
      else
        draw(batch, origin + first, spread);
      writer.write(t, first, batch);
      if (stop && stop()) return 0;
    }
    total += count;
  }
  write_attachments(model, directory, type);
  writer.finish();
  return total;
}

}  // namespace spillway::models
