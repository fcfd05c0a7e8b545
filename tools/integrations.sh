#!/bin/sh
# Compares LLaMA-Factory's and Axolotl's own runs with the same by Spillway, as docs/integrations.md has it: each in an
# environment of its own, as they pin old packages. It needs build-test, made by tools/test.sh, a network and 6 GB of
# disk for either; no GPU.
#
#   tools/integrations.sh [llamafactory|axolotl [CASE...]]    "sft lora", say; both, and all cases
#
# SPILLWAY_INTEGRATIONS names a directory for the environments and the runs; build-integrations. SPILLWAY_LIBRARY names
# a library, if it is not build-test's.
set -eu
cd "$(dirname "$0")/.."
library=${SPILLWAY_LIBRARY:-$PWD/build-test/src/libspillway.so}
[ -e "$library" ] || { echo "integrations.sh: $library is not there; run tools/test.sh once" >&2; exit 1; }
export SPILLWAY_LIBRARY="$library"
place=${SPILLWAY_INTEGRATIONS:-build-integrations}
mkdir -p "$place"

packages() {
  case $1 in
    # The newest PyTorch that there is a torchaudio for: pip takes a newer one, and torchaudio then ends with an error.
    llamafactory) echo llamafactory==0.9.5 torch==2.11.0 torchaudio==2.11.0 torchvision bitsandbytes==0.50.2 ;;
    axolotl) echo axolotl==0.19.0 ;;
    *) echo "integrations.sh: $1: is none of llamafactory, axolotl" >&2; exit 2 ;;
  esac
}

compare() {
  program=$1
  shift
  wanted=$(packages "$program")
  if [ ! -e "$place/$program/done" ]; then
    python3 -m venv "$place/$program"
    # shellcheck disable=SC2086  # a list
    "$place/$program/bin/pip" install -q $wanted
    touch "$place/$program/done"
  fi
  "$place/$program/bin/python" tools/check_integrations.py "$program" "$place/runs-$program" "$@"
}

if [ $# -gt 0 ]; then
  compare "$@"
else
  compare llamafactory
  compare axolotl
fi
