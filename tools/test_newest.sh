#!/bin/sh
# Runs the suites of the Python package with the newest PyTorch, transformers, PEFT, TRL and Lightning of PyPI, which
# take 6 GB of disk; tools/test.sh uses those that Debian's PyTorch can run. It needs build-test, made by tools/test.sh.
#
#   tools/test_newest.sh [NAME...]    names of suites, as `trl` for tests/python/trl_test.py; all of them
#
# SPILLWAY_NEWEST names a directory for the environment that it makes; build-newest. Delete it to get newer packages.
set -eu
cd "$(dirname "$0")/.."
library=build-test/src/libspillway.so
[ -e "$library" ] ||
  { echo "test_newest.sh: build-test has no library; run tools/test.sh once" >&2; exit 1; }
place=${SPILLWAY_NEWEST:-build-newest}
if [ ! -e "$place/done" ]; then
  python3 -m venv "$place"
  "$place/bin/pip" install -q torch transformers accelerate peft trl datasets lightning pytorch_lightning
  # What quantizes weights; those that do not install here have their tests skipped.
  for package in bitsandbytes torchao hqq; do
    "$place/bin/pip" install -q "$package" || echo "test_newest.sh: $package does not install; its tests are skipped"
  done
  touch "$place/done"
fi
place=$(cd "$place" && pwd)
shown="torch|transformers|accelerate|peft|trl|lightning|bitsandbytes|torchao|hqq"
"$place/bin/pip" list 2>/dev/null | grep -E "^($shown) "

export SPILLWAY_LIBRARY="$PWD/$library" SPILLWAY_BINARY="$PWD/build-test/tools/spillway" PATH="$place/bin:$PATH"
python -c "import torch, trl" || { echo "test_newest.sh: delete $place and try again" >&2; exit 1; }
[ $# -gt 0 ] || set -- $(ls tests/python/*_test.py | sed 's|.*/||; s|_test.py||')
failed=""
for name in "$@"; do
  # The time is that of a suite that hangs: the slowest takes two minutes on two cores.
  if timeout 900 python "tests/python/${name}_test.py" >"$place/$name.log" 2>&1; then
    echo "ok      $name: $(tail -n 1 "$place/$name.log")"
  else
    echo "FAILED  $name: $place/$name.log"
    failed=yes
  fi
done
[ -z "$failed" ]
