// What to write instead of a key that no row has.
#pragma once

#include <string>
#include <string_view>

namespace spillway {

// `section` is "" at the top. In this order: the same letters in another case; the word that other programs have for a
// key here; the same key in another section; the nearest spelling in this section, then elsewhere; what the section
// knows.
std::string hint_for_unknown(std::string_view section, std::string_view leaf);

// The path nearest to a misspelled one, or to the end of one ("lr", "offload_param.device"); empty: none is near.
std::string closest_path(std::string_view path);

}  // namespace spillway
