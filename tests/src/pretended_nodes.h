// A machine with as many NUMA nodes as a test likes. All have the CPUs of this process and lie in its first memory, so
// threads are bound and memory is placed, with no effect but the path.
//
// The program must be linked with `--wrap` (meson.build), which brings every call of usable_nodes() here.
#pragma once

namespace spillway::testing {

class PretendedNodes {
 public:
  explicit PretendedNodes(unsigned nodes);
  ~PretendedNodes();
  PretendedNodes(const PretendedNodes&) = delete;
  PretendedNodes& operator=(const PretendedNodes&) = delete;
};

}  // namespace spillway::testing
