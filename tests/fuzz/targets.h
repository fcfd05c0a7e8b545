// The fuzz targets: for each parser of bytes that somebody else may have written, a function that parses its input and
// checks what was promised of whatever is accepted. A spillway::Error is a refusal and ends in the target; every other
// exception, a failed check and whatever a sanitizer says is a finding. README.md has how to run them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "spillway/error.h"

namespace spillway::fuzz {

using Bytes = std::span<const std::byte>;

void config(Bytes input);
void file_names(Bytes input);
void safetensors_header(Bytes input);
void safetensors_index(Bytes input);
void manifest(Bytes input);
void store_description(Bytes input);
void snapshot_record(Bytes input);
void step_log(Bytes input);
void pickle(Bytes input);
void model_config(Bytes input);
void decoder_config(Bytes input);
void token_file(Bytes input);
void prepared(Bytes input);

inline std::string_view text_of(Bytes input) { return {reinterpret_cast<const char*>(input.data()), input.size()}; }

// What a parser returns; nothing when it refuses the input, saying why.
template <class Parse>
auto accepted(Parse parse) -> std::optional<decltype(parse())> {
  try {
    return parse();
  } catch (const Error& error) {
    SPILLWAY_CHECK(!error.parts().object.empty() && !error.parts().happened.empty(), "an error names what it is about");
    return std::nullopt;
  }
}

// The first byte, which some targets take for themselves; 0 when there is none.
inline unsigned take_byte(Bytes& input) {
  if (input.empty()) return 0;
  const auto byte = std::to_integer<unsigned>(input.front());
  input = input.subspan(1);
  return byte;
}

// A file of this process with these bytes, for parsers that want one. It is written anew by the next call of that name.
std::filesystem::path scratch_file(const std::string& name, Bytes content);

}  // namespace spillway::fuzz
