// What the APIs of the library for C have in common: c_api.h (the engine), c_ranks.h and c_io.h (files and queues).
//
// Every function that can fail returns a status; what went wrong stays with the calling thread as a message in the form
// `<object>: <what happened> (<errno text>); <what to do>`. A function that returns a value answers what it cannot do
// with 0 or null (an enumeration with -1, a rate or a scale with NaN), and the message says why. No exception leaves a
// function. Strings are UTF-8 and copied.
//
// Handles are numbers, not addresses: a handle that is null, was given back, or is of another kind is
// SPILLWAY_INVALID_ARGUMENT wherever it is passed. Functions that give a handle back accept null.
//
// Structs begin with their size, `spillway_options options = {.struct_size = sizeof options};`, so that a program and a
// library of another version understand each other: they may become longer, and what a shorter one does not have takes
// its default. A size of 0 is refused, and so is a longer one than the library's that says something there (so a struct
// grows by whole words, and all of it is initialized).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "spillway/version.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of this header; it grows with every change of what is below. spillway_api_version() is the library's.
#define SPILLWAY_API_VERSION 1

// Enumerations are of 32 bits for every compiler.
typedef int32_t spillway_status;
enum {
  SPILLWAY_OK = 0,
  SPILLWAY_INVALID_ARGUMENT,  // from here on as spillway::Code, in its order
  SPILLWAY_NOT_FOUND,
  SPILLWAY_EXISTS,
  SPILLWAY_DOES_NOT_FIT,
  SPILLWAY_BUSY,
  SPILLWAY_IO,
  SPILLWAY_CORRUPT,
  SPILLWAY_NON_FINITE,
  SPILLWAY_UNSUPPORTED,
  SPILLWAY_DEVICE,
  SPILLWAY_UNEXPECTED,  // no error of Spillway's: out of memory, say
};

// What can be done about an error, as spillway::Remedy, in its order. A code keeps its number for good; a library that
// is newer than this header may give others, of which the message has its words.
typedef int32_t spillway_remedy;
enum {
  SPILLWAY_REMEDY_NONE = 0,
  SPILLWAY_REMEDY_RESUME_OR_REPLACE,
  SPILLWAY_REMEDY_REPLACE,
  SPILLWAY_REMEDY_RESTORE_OR_REPLACE,
  SPILLWAY_REMEDY_OTHER_PATH_OR_REPLACE,
  SPILLWAY_REMEDY_THAT_VERSION_OR_REPLACE,
  SPILLWAY_REMEDY_ITS_SETTINGS_OR_REPLACE,
  SPILLWAY_REMEDY_COPY_AGAIN_OR_REPLACE,
  SPILLWAY_REMEDY_REPLACE_AND_KEEP_STEPS,
  SPILLWAY_REMEDY_RESUME,
  SPILLWAY_REMEDY_REPAIR_AND_RESUME,  // value: what to repair
  SPILLWAY_REMEDY_CHECK_DRIVE_AND_REWRITE,
  SPILLWAY_REMEDY_CHECK_DRIVE_AND_GO_BACK,    // values: the step to which
  SPILLWAY_REMEDY_CHECK_DRIVE_AND_ROLL_BACK,  // values: the step, the directories of the store, the step before
  SPILLWAY_REMEDY_CHECK_DRIVE_AND_RESTORE,    // value: the step that is damaged
  SPILLWAY_REMEDY_CHECK_DRIVE_AND_REPLACE,
  SPILLWAY_REMEDY_CHECK_RECORDS_AND_RESTORE,
  SPILLWAY_REMEDY_NO_STEP_IS_LEFT,
  SPILLWAY_REMEDY_NOTHING_WAS_CHANGED,  // value: the step that cannot be gone back to
  SPILLWAY_REMEDY_CHECK_PATH_OR_BEGIN,
  SPILLWAY_REMEDY_MAKE_ROOM_OR_HALVE,
  SPILLWAY_REMEDY_RAISE_BUDGET,           // values: the key in the section spillway, the size
  SPILLWAY_REMEDY_RAISE_BUDGET_OR_HALVE,  // the same
  SPILLWAY_REMEDY_NAME_TAG,
  SPILLWAY_REMEDY_NAME_ANOTHER_TAG,
  SPILLWAY_REMEDY_IMPORT_UNVERIFIED,
  SPILLWAY_REMEDY_SAY_STEPS_OR_NUMBER,
  SPILLWAY_REMEDY_REOPEN,
  SPILLWAY_REMEDY_CUT_SHORT,
  SPILLWAY_REMEDY_RENEW_STORE,
  SPILLWAY_REMEDY_ITS_STATES_OR_SNAPSHOT,
};

const char* spillway_version(void);
uint32_t spillway_api_version(void);
// Of the last call of this thread that failed; valid until the next one that fails.
const char* spillway_error_message(void);
// What that message says to do, where a client has other words for it than the library; SPILLWAY_REMEDY_NONE where
// nobody has. Its values are the step, path or size that it names, in turn, and null after the last.
spillway_remedy spillway_error_remedy(void);
const char* spillway_error_remedy_value(uint32_t index);
// The message with `words` for the remedy, `{}` in them standing for its values in turn; with none where they are "",
// and as it is without a remedy. Valid until the next call of this function or one that fails.
const char* spillway_error_message_in(const char* words);
// Where messages go, one call at a time, from any thread; null: nowhere. At first they go to stderr. The sink must not
// call an engine.
void spillway_set_log(void (*sink)(void* user, int warning, const char* message), void* user);

#ifdef __cplusplus
}
#endif
