// What the public headers need of the compiler. Those that include no other one of them include this first, so that it
// speaks before anything that a compiler of an older language does not understand.
#pragma once

#ifndef __cplusplus
#error "This header of Spillway is for C++; C programs include spillway/c_api.h"
#elif __cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L)
#error "Spillway's headers need C++20; compile with -std=c++20 (g++ 12, clang 14, or newer)"
#endif
