// Runs code on a thread of its own for which system calls fail with a chosen errno: seccomp filters, which bind that
// thread and no other. Needs no privileges.
#pragma once

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <thread>

namespace spillway::testing {

struct RefusedCall {
  std::uint32_t number = 0;  // SYS_...
  int error = 0;
  std::optional<std::uint32_t> second_argument = {};  // only calls with this one (the command of fcntl)
};

// False when the kernel does not take the filter; `body` has not run then.
inline bool with_refused_call(const RefusedCall& call, const std::function<void()>& body) {
  bool installed = false;
  std::thread([&] {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        // Without a second argument to look for, both ways lead to the refusal.
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.second_argument.value_or(0), 0,
                 static_cast<std::uint8_t>(call.second_argument ? 1 : 0)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(call.error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
    installed =
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
    if (installed) body();
  }).join();
  return installed;
}

// The same for several calls: a thread inherits the filters of the one that started it.
inline bool with_refused_calls(std::span<const RefusedCall> calls, const std::function<void()>& body) {
  if (calls.empty()) {
    body();
    return true;
  }
  bool inner = false;
  return with_refused_call(calls.front(), [&] { inner = with_refused_calls(calls.subspan(1), body); }) && inner;
}

}  // namespace spillway::testing
