// The table as a JSON Schema, for editors.
#pragma once

#include <string>

namespace spillway::config {

// Of draft 2020-12. It says what each key may hold; what keys say together is for the reader alone. Comments and
// trailing commas are a matter of the editor's mode (JSON with comments).
std::string schema();

}  // namespace spillway::config
