// Refuses a process with two versions of the library: a program's own and that of something it loads. Their names are
// the same, so the dynamic linker may give one of them functions of the other.
#pragma once

namespace spillway {

// Throws kUnsupported when the process has a libspillway of another version than this one, naming its file.
void refuse_other_versions();

}  // namespace spillway
