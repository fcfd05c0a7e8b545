// Versions, errors and messages of all APIs for C.
#include "spillway/c_base.h"

#include <exception>
#include <string>
#include <string_view>

#include "aio/c/calls.h"
#include "spillway/error.h"
#include "spillway/log.h"

using namespace spillway;
using namespace spillway::c;

static_assert(SPILLWAY_DEVICE == static_cast<int32_t>(Code::kDevice) + 1);
static_assert(SPILLWAY_REMEDY_ITS_STATES_OR_SNAPSHOT + 1 == static_cast<int>(kRemedies));

namespace {

internal::ThreadError& last() noexcept { return internal::thread_error<SPILLWAY_VERSION_NUMBER>(); }

}  // namespace

namespace spillway::c {

spillway_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    last().message = error.what();
    last().error = error;
    return static_cast<spillway_status>(static_cast<int>(error.code()) + 1);
  } catch (const std::exception& error) {
    last().message = error.what();
    last().error.reset();
  } catch (...) {
    last().error.reset();
    last().message = "an exception that is not std::exception came out of a function of the caller's";
  }
  return SPILLWAY_UNEXPECTED;
}

}  // namespace spillway::c

const char* spillway_version(void) { return SPILLWAY_VERSION; }

uint32_t spillway_api_version(void) { return SPILLWAY_API_VERSION; }

const char* spillway_error_message(void) { return last().message.c_str(); }

spillway_remedy spillway_error_remedy(void) {
  return last().error ? static_cast<spillway_remedy>(last().error->parts().remedy) : SPILLWAY_REMEDY_NONE;
}

const char* spillway_error_remedy_value(uint32_t index) {
  if (!last().error || index >= last().error->parts().values.size()) return nullptr;
  return last().error->parts().values[index].c_str();
}

const char* spillway_error_message_in(const char* words) {
  if (!last().error || words == nullptr) return last().message.c_str();
  last().message_in = last().error->message_in(words);
  return last().message_in.c_str();
}

void spillway_set_log(void (*sink)(void*, int, const char*), void* user) {
  if (sink == nullptr) return set_log_sink({});
  set_log_sink([sink, user](LogLevel level, std::string_view message) {
    sink(user, level == LogLevel::kWarning, std::string(message).c_str());
  });
}
