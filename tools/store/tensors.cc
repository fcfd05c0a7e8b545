#include "tools/store/tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "spillway/tensor_store.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/byte_bar.h"
#include "tools/terminal/json.h"
#include "tools/terminal/tell.h"

namespace spillway::store {
namespace {

using terminal::fixed_text_of_size;

std::string bad_text(const BadTensor& bad) {
  return fmt::format("{}: {} bytes from {} on {}", bad.name, bad.bytes, bad.offset,
                     bad.error == 0 ? "are not those that were put"
                                    : "cannot be read (" + std::generic_category().message(bad.error) + ")");
}

std::string text_of(const StoredTensors& store) {
  std::size_t longest = 0;
  for (const TensorInfo& tensor : store.tensors) longest = std::max(longest, tensor.name.size());
  std::string text = fmt::format("tensors   {}, of commit {}{}\n", store.tensors.size(), store.commits,
                                 store.in_use ? "; a process has the store open" : "");
  text += fmt::format("space     {} of {}\n", fixed_text_of_size(store.nvme_bytes),
                      fixed_text_of_size(store.nvme_capacity));
  for (const TensorInfo& tensor : store.tensors) {
    text += fmt::format("  {:<{}}  {:>10}  {}\n", tensor.name, longest, fixed_text_of_size(tensor.bytes),
                        to_string(tensor.shape));
  }
  if (store.damaged) text += "damaged   one of two copies of what a file or a commit says; the other one is whole\n";
  return text;
}

std::string json_of(const StoredTensors& store, const PrintTensors& options, const std::vector<BadTensor>& bad) {
  terminal::Json json;
  json.put("commits", store.commits);
  json.put("in_use", store.in_use);
  json.put("damaged", store.damaged);
  json.put("nvme_bytes", store.nvme_bytes);
  json.put("nvme_capacity", store.nvme_capacity);
  json.list("tensors", [&] {
    for (const TensorInfo& tensor : store.tensors) {
      json.item([&] {
        json.put("name", tensor.name);
        json.put("type", tensor.shape.type);
        json.put("shape", tensor.shape.dims);
        json.put("bytes", tensor.bytes);
      });
    }
  });
  if (options.verify) {
    json.list("bad", [&] {
      for (const BadTensor& each : bad) {
        json.item([&] {
          json.put("name", each.name);
          json.put("offset", each.offset);
          json.put("bytes", each.bytes);
          json.put("errno", each.error);
        });
      }
    });
  }
  return json.text();
}

}  // namespace

int print_tensors(const std::vector<std::filesystem::path>& paths, const PrintTensors& options) {
  constexpr int kWhole = 0, kDamaged = 2;
  const StoredTensors store = inspect_tensors(paths);
  if (!options.json) terminal::tell("{}", text_of(store));
  std::vector<BadTensor> bad;
  if (options.verify) {
    terminal::ByteBar bar("reading every byte");
    const std::uint64_t bytes = verify_tensors(
        paths,
        [&](const BadTensor& each) {
          bad.push_back(each);
          bar.line(bad_text(each));
        },
        [&](auto done, auto all) { bar.at(done, all); });
    bar.clear();
    if (!options.json) {
      terminal::tell("verified  {}: {}\n", fixed_text_of_size(bytes),
                     bad.empty()       ? "every byte is whole"
                     : bad.size() == 1 ? "1 block is damaged"
                                       : fmt::format("{} blocks are damaged", bad.size()));
    }
  }
  if (options.json) terminal::tell("{}\n", json_of(store, options, bad));
  return store.damaged || !bad.empty() ? kDamaged : kWhole;
}

}  // namespace spillway::store
