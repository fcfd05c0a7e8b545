// The version of these headers, for C and C++, as text and as a number for #if. The library that is loaded says its
// own: spillway_version(). Before 1.0 a new minor version may change what programs see, a new patch only adds to it.
#pragma once

#define SPILLWAY_VERSION_MAJOR 0
#define SPILLWAY_VERSION_MINOR 1
#define SPILLWAY_VERSION_PATCH 0
#define SPILLWAY_VERSION "0.1.0"
#define SPILLWAY_VERSION_NUMBER (SPILLWAY_VERSION_MAJOR * 10000 + SPILLWAY_VERSION_MINOR * 100 + SPILLWAY_VERSION_PATCH)
