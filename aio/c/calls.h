// What the functions of all APIs for C have in common: errors become statuses, structs have their sizes, handles are
// looked up.
//
// A handle is a number in a pointer's clothes: the kind, a place in the table of the kind, and how often the place was
// given away before. So whatever a program hands in, is looked up and never followed, and what was given back is known
// from what took its place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/c_base.h"
#include "spillway/error.h"

namespace spillway {
namespace internal {

// What went wrong last in a thread.
struct ThreadError {
  std::string message, message_in;
  std::optional<Error> error;  // of Spillway's
};
// One for libspillway.so and libspillway_io.so where a process has both in one version, whatever is hidden otherwise:
// it asks the one for the message of a call that the other answered.
template <unsigned Version>
[[gnu::visibility("default")]] inline ThreadError& thread_error() {
  static thread_local ThreadError error;
  return error;
}

}  // namespace internal

namespace c {

// Of the exception that is being handled; its message is the thread's from now on.
spillway_status status_of_exception() noexcept;

// Runs `body`, and keeps what it throws.
template <typename Body>
spillway_status guarded(Body&& body) noexcept {
  try {
    body();
    return SPILLWAY_OK;
  } catch (...) {
    return status_of_exception();
  }
}

// The same for what returns a value.
template <typename Value, typename Body>
Value answered(Value otherwise, Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    status_of_exception();
    return otherwise;
  }
}

[[noreturn]] inline void refuse(std::string object, std::string happened, std::string hint = "") {
  throw Error(Code::kInvalidArgument, {std::move(object), std::move(happened), 0, std::move(hint)});
}

// What a caller must give.
template <typename Pointer>
Pointer given(Pointer pointer, const char* what) {
  if (pointer == nullptr) refuse(what, "is null");
  return pointer;
}

// A caller can write any number for a value of an enumeration.
template <typename To>
To checked(int32_t value, To last, const char* what) {
  if (value < 0 || value > static_cast<int32_t>(last)) refuse(what, "no such value: " + std::to_string(value));
  return static_cast<To>(value);
}

// Whatever stands there where a program wrote nothing must not be followed far.
template <typename Struct>
void check_struct(const Struct* to, const char* what) {
  if (to == nullptr || (to->struct_size >= sizeof to->struct_size && to->struct_size <= 4096)) return;
  refuse(what, "its struct_size is " + std::to_string(to->struct_size), "write its sizeof there");
}

// What a caller of another version gave, in this version's struct. Null: all defaults.
template <typename Struct>
Struct read_struct(const Struct* from, const char* what) {
  Struct read = {};
  if (from == nullptr) return read;
  check_struct(from, what);
  const std::size_t size = from->struct_size;
  std::memcpy(&read, from, std::min(size, sizeof read));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof read && std::any_of(bytes + sizeof read, bytes + size, [](unsigned char byte) { return byte; })) {
    throw Error(Code::kUnsupported, {what, "says something that this version of the library does not know", 0,
                                     "install the version of the header"});
  }
  return read;
}

// Results into a struct that may be longer or shorter than this version's; null: they are not wanted.
template <typename Struct>
void write_struct(Struct* to, Struct value) {
  if (to == nullptr) return;
  const std::size_t size = value.struct_size = to->struct_size;
  std::memcpy(to, &value, std::min(size, sizeof value));
  if (size > sizeof value) std::memset(reinterpret_cast<unsigned char*>(to) + sizeof value, 0, size - sizeof value);
}

// Nothing refers to an object but the table, and for as long as a call lasts the call.
template <typename Handle, typename Object>
class Handles {
 public:
  explicit Handles(std::uint8_t kind, const char* name) : kind_(kind), name_(name) {}

  Handle* add(std::shared_ptr<Object> object) {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      if (places_.size() == kMost) throw Error(Code::kUnsupported, {name_, "there are too many", 0, "give some back"});
      free_.reserve(places_.size() + 1);
      places_.emplace_back();
      free_.push_back(static_cast<std::uint32_t>(places_.size() - 1));
    }
    const std::uint32_t place = free_.back();
    free_.pop_back();
    places_[place].object = std::move(object);
    const std::uint64_t number = std::uint64_t{places_[place].generation} << 32 | std::uint64_t{place} << 8 | kind_;
    return reinterpret_cast<Handle*>(static_cast<std::uintptr_t>(number));
  }
  std::shared_ptr<Object> find(const Handle* handle) {
    std::lock_guard lock(mutex_);
    return places_[place_of(handle)].object;
  }
  // The handle is none any more.
  std::shared_ptr<Object> take(const Handle* handle) {
    std::lock_guard lock(mutex_);
    return end(place_of(handle));
  }
  // All that belong to something that goes.
  template <typename Belongs>
  std::vector<std::shared_ptr<Object>> take_all(Belongs&& belongs) {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Object>> taken;
    for (std::uint32_t place = 0; place < places_.size(); ++place) {
      if (places_[place].object && belongs(*places_[place].object)) taken.push_back(end(place));
    }
    return taken;
  }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 24;
  static_assert(sizeof(void*) == 8, "a handle has 32 bits for the generation, 24 for the place, 8 for the kind");
  struct Entry {
    std::uint32_t generation = 1;
    std::shared_ptr<Object> object;
  };

  std::uint32_t place_of(const Handle* handle) const {
    if (handle == nullptr) refuse(name_, "is null");
    const std::uint64_t number = reinterpret_cast<std::uintptr_t>(handle);
    const auto place = static_cast<std::uint32_t>(number >> 8 & (kMost - 1));
    if (static_cast<std::uint8_t>(number) != kind_ || place >= places_.size() || !places_[place].object ||
        places_[place].generation != number >> 32) {
      refuse(name_, "is no handle that lives",
             "it was given back before, what it is a part of was destroyed, or it never was one");
    }
    return place;
  }
  std::shared_ptr<Object> end(std::uint32_t place) {
    ++places_[place].generation;
    free_.push_back(place);
    return std::exchange(places_[place].object, nullptr);
  }

  const std::uint8_t kind_;
  const char* const name_;
  std::mutex mutex_;
  std::vector<Entry> places_;
  std::vector<std::uint32_t> free_;
};

template <typename Object, typename... Parts>
std::shared_ptr<Object> made_of(Parts&&... parts) {
  return std::shared_ptr<Object>(new Object{std::forward<Parts>(parts)...});
}

}  // namespace c
}  // namespace spillway
