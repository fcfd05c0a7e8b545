// `spillway generate`: a model and a prompt in; its text out, token by token.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/placement.h"
#include "tools/generate/sampler.h"

namespace spillway::models::generate {

struct GenerateOptions {
  std::filesystem::path model;                // its directory, or a store
  std::vector<std::filesystem::path> others;  // the store's other directories
  std::filesystem::path adapter;              // of the model, as peft saves it; empty: none, or the model's own
  std::filesystem::path config;               // empty: everything in memory, weights as they lie in the files
  std::filesystem::path store;                // where streamed weights are kept for the next time; empty: nowhere
  std::filesystem::path tokenizer;            // empty: the model's
  std::string prompt;
  std::filesystem::path prompt_file;  // in its place; - is standard input
  bool ids = false, chat = false;
  std::uint32_t tokens = 128;  // new ones at the most
  Sampling sampling;
  bool past_end = false;             // goes on after an end of text
  std::uint32_t slice = 256;         // tokens of the prompt that are inside a block at one time
  std::optional<Placement> cache;    // of keys and values; none: the first tier that has room
  std::filesystem::path log, trace;  // a JSON line for each token; a timeline; empty: none
  bool verbose = false;              // what goes where, on standard error
};

// 0, or what the signal that ended it makes of it (terminal/interrupt.h). Errors: spillway::Error.
int generate(const GenerateOptions& options);

}  // namespace spillway::models::generate
