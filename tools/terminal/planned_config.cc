#include "tools/terminal/planned_config.h"

#include <utility>

#include "tools/terminal/heard.h"

namespace spillway::terminal {

void refuse_for_one_rank(const Error& error, const std::function<void(std::uint32_t ranks)>& read) {
  constexpr std::uint32_t kNobody = 0;
  ErrorParts parts = error.parts();
  const Heard heard;  // it was said before
  try {
    read(kNobody);
    parts.happened += "\n--ranks: was taken as 1; say --ranks N if N processes train by the file together";
  } catch (const Error&) {  // as well
  }
  throw Error(error.code(), std::move(parts));
}

}  // namespace spillway::terminal
