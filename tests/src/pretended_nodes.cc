#include "tests/src/pretended_nodes.h"

#include <atomic>

#include "kernels/topology.h"

namespace {
std::atomic<unsigned> pretended = 0;
}  // namespace

extern "C" {
std::vector<spillway::CpuNode> __real__ZN8spillway12usable_nodesEv();
std::vector<spillway::CpuNode> __wrap__ZN8spillway12usable_nodesEv() {
  auto nodes = __real__ZN8spillway12usable_nodesEv();
  if (pretended > 0) nodes.assign(pretended, nodes[0]);
  return nodes;
}
}

namespace spillway::testing {

PretendedNodes::PretendedNodes(unsigned nodes) { pretended = nodes; }
PretendedNodes::~PretendedNodes() { pretended = 0; }

}  // namespace spillway::testing
