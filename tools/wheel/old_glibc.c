// What a C library of 2018 (2.28) does not have, and the code of a newer compiler and C++ library asks for. Linked into
// each file of the wheel by tools/wheel.sh, and seen by none outside.
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#pragma GCC visibility push(hidden)

// Says that the process has one thread, which saves atomic operations; never said here.
char __libc_single_threaded = 0;

// libzip's and std::random_device's.
void arc4random_buf(void* bytes, size_t count) {
  for (char* next = bytes; count > 0;) {
    const ssize_t drawn = getrandom(next, count, 0);
    if (drawn < 0) continue;  // by a signal
    next += drawn;
    count -= (size_t)drawn;
  }
}
uint32_t arc4random(void) {
  uint32_t drawn;
  arc4random_buf(&drawn, sizeof drawn);
  return drawn;
}

static const char* const kNames[] = {
#include "errno_names.inc"  // [EPERM] = "EPERM", and so on: tools/wheel.sh makes it of <errno.h>
};

const char* strerrorname_np(int error) {
  return error >= 0 && (size_t)error < sizeof kNames / sizeof *kNames ? kNames[error] : NULL;
}

// The C library's own constant text, for errors that have a name.
const char* strerrordesc_np(int error) {
  static char unused[1];
  return strerrorname_np(error) != NULL ? strerror_r(error, unused, sizeof unused) : NULL;
}
