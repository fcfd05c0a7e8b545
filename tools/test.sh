#!/bin/sh
# Builds and runs the tests, in one build, without those of benches and of the source text, and without the longest.
# With --all every test, in that build and two more, and the fuzzers. Both take few random cases and kills, few steps of
# the runs that are compared layout by layout or with references, and few large models; with --full it is --all with as
# many as the tests have by themselves. SPILLWAY_CASES, SPILLWAY_KILLS and SPILLWAY_STEPS say how many. The builds:
#   build-test   release, everything
#   build-asan   address and undefined sanitizers; without benches, and without the rules of the house, which look at
#                the source and not at the build; of each suite every other case, but for --full
#   build-tsan   thread sanitizer; the tests of suite `threads`, likewise, and of each suite the other half; without
#                those of tools, but for --full
#   build-fuzz   clang's libFuzzer, SPILLWAY_FUZZ_SECONDS (10) on each parser; see tests/fuzz
# The build directories stay, so a second run only builds what changed. The last line counts the test programs' own
# reports: `N passed, N failed, N skipped`. Fails when a test failed, when a build failed, or when a run ran nothing.
set -eu
cd "$(dirname "$0")/.."
all=yes few=yes
case "$*" in
  "") all="" ;;
  --all) ;;
  --full) few="" ;;
  *) echo "test.sh: it takes nothing but --all or --full" >&2; exit 1 ;;
esac
if [ -n "$few" ]; then
  export SPILLWAY_CASES="${SPILLWAY_CASES:-3}" SPILLWAY_KILLS="${SPILLWAY_KILLS:-3}"
  export SPILLWAY_STEPS="${SPILLWAY_STEPS:-3}" SPILLWAY_FUZZ_SECONDS="${SPILLWAY_FUZZ_SECONDS:-10}"
fi
# openmpi-bin: ranks over MPI are processes of mpirun. iproute2: on two hosts, between which there is a network.
tools/install_packages.sh cmake python3-torch python3-venv libopenmpi-dev openmpi-bin iproute2 \
  ${all:+clang libclang-rt-dev libomp-dev lld}
. tools/compiler_cache.sh

# Debian has no transformers, peft and Lightning. Without them the suites that need them are skipped. These take
# Debian's PyTorch, which is that of Debian's Python; what the later ones need beside each other comes with
# transformers, and they would bring another PyTorch themselves.
packages="transformers==4.44.2 accelerate==0.33.0 numpy<2 jinja2"
alone="peft==0.17.1 lightning==2.2.5 pytorch_lightning==2.2.5 lightning-utilities==0.15.3 torchmetrics==1.9.0"
if [ "$(cat build-python/done 2>/dev/null)" != "$packages $alone" ]; then
  rm -rf build-python
  # shellcheck disable=SC2086  # words each
  /usr/bin/python3 -m venv --system-site-packages build-python &&
    build-python/bin/pip install -q $packages && build-python/bin/pip install -q --no-deps $alone &&
    echo "$packages $alone" >build-python/done &&
    rm -f build-test/build.ninja ||  # Meson looks for a Python when it sets up
    echo "no transformers, peft or Lightning from PyPI"
fi
# The one test of device code that needs no GPU needs this.
if [ -e build-python/done ] && ! build-python/bin/pip show -q nvidia-cuda-cuobjdump 2>/dev/null; then
  build-python/bin/pip install -q --no-deps nvidia-cuda-cuobjdump==13.5.37 || echo "no cuobjdump from PyPI"
fi
if [ -e build-python/done ]; then export PATH="$PWD/build-python/bin:$PATH"; fi
# Likewise the site of docs/, which a rule of the house builds.
[ -x build-docs/venv/bin/mkdocs ] || tools/docs.sh --install || echo "no mkdocs from PyPI"

# Sanitizers map their shadow at fixed addresses, which a large vm.mmap_rnd_bits can collide with; so their tests run
# with address randomisation off, where the machine lets us.
still=""
if setarch "$(uname -m)" -R true 2>/dev/null; then still="setarch $(uname -m) -R"; fi

# Tests wait for drives and for each other, so more of them than cores run at a time.
export MESON_TESTTHREADS=$(($(nproc) * 2))

# The environment chooses the compiler, and a directory keeps the one that it was set up with.
configure() {  # directory, then meson options
  directory=$1
  shift
  if [ -f "$directory/build.ninja" ] && [ "${CXX:-}" = "$(cat "$directory/compiler" 2>/dev/null)" ]; then
    meson configure "$directory" "$@" >/dev/null
  else
    rm -rf "$directory"
    # Not quiet about a failure: Meson says what it did not find on standard output.
    said=$(meson setup "$directory" . -Dtests=enabled "$@" 2>&1) || { echo "$said"; return 1; }
    echo "${CXX:-}" >"$directory/compiler"
  fi
}

# A report of an earlier run must not stand in for a program that crashed in this one. A failure shows in the reports,
# a failed build by their absence; so the exit status is left to the count at the end.
run() {  # prefix, directory, then options of meson test
  prefix=$1 directory=$2
  shift 2
  rm -f "$directory"/*.xml "$directory"/meson-logs/testlog.json
  $prefix meson test -C "$directory" --print-errorlogs "$@" || true
}

# The release build is g++'s, the others are clang's, which has compiled with sanitizers in half of g++'s time. All take
# the files of a library together, many at a time, which is twice as fast: two files of a library may not use one name
# for two things, even in unnamed namespaces. In the release build their number must not divide that of a library's
# files: Meson 1.0 then misses an object of the archive.
#
# One GPU's machine code, and PTX for newer ones, is enough to see that it compiles and to test it where there is a GPU;
# sanitizers do not look into nvcc's objects.
echo "== release"
# g++ has the memory to do without collecting garbage.
configure build-test -Dbuildtype=release -Dgpu_arch=80 -Dunity=on -Dunity_size=9 \
  -Dcpp_args=--param=ggc-min-heapsize=1000000 || true
if [ -z "$all" ]; then
  run "" build-test --no-suite bench --no-suite house --no-suite long --no-suite full --timeout-multiplier 4
  exec python3 tools/count_tests.py build-test
fi
run "" build-test ${few:+--no-suite full} --timeout-multiplier 4

# Sanitizers look at every other case, as GoogleTest's variables say it and tests/report.py reads them. The commit says
# at which: so in the course of a few commits each build looks at all of them.
half() {  # 0: those of this commit's turn, 1: the others
  [ -z "$few" ] || export GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$(((turn + $1) % 2))
}
turn=0
case "$(git rev-parse HEAD 2>/dev/null)" in *[13579bdf]) turn=1 ;; esac

# Everything takes ten times as long from here on; so more patience with a case before it counts as one that hangs.
export SPILLWAY_PATIENCE=300
echo "== address and undefined sanitizers"
# The programs of sanitizers are large; lld links them in less than half of the time. Meson asks these when it sets up.
export CXX="ccache clang++" CXX_LD=lld
# A precompiled header of clang's names the files that it was made of. One that ccache has from a checkout that is gone
# would be of no use; so what is made with one is left out of the cache.
export CCACHE_SLOPPINESS=time_macros
export ASAN_OPTIONS=abort_on_error=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=halt_on_error=1:abort_on_error=1:print_stacktrace=1
configure build-asan -Dcuda=disabled -Dbuildtype=debugoptimized -Doptimization=0 \
  "-Dcpp_args=-g1 -fsanitize-ignorelist=$PWD/tests/ubsan.ignore" -Db_sanitize=address,undefined \
  -Db_lundef=false -Dunity=on -Dunity_size=16 || true
half 0
run "$still" build-asan --no-suite bench --no-suite house --no-suite full --timeout-multiplier 5

echo "== thread sanitizer"
export TSAN_OPTIONS="halt_on_error=1:abort_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/tsan.supp"
# -O1 costs the build little and saves the run a lot.
configure build-tsan -Dcuda=disabled -Dbuildtype=debugoptimized -Doptimization=1 -Dcpp_args=-g1 \
  -Db_sanitize=thread -Db_lundef=false -Dunity=on -Dunity_size=16 || true
half 1
run "$still" build-tsan --suite threads --no-suite bench ${few:+--no-suite tools} --timeout-multiplier 10

echo "== fuzzers"
unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
configure build-fuzz -Dcuda=disabled -Dbuildtype=debugoptimized -Doptimization=1 -Dcpp_args=-g1 \
  -Dfuzz=enabled -Db_pch=false -Dunity=on -Dunity_size=12 || true
run "$still" build-fuzz --suite fuzz
grep -h '^fuzz ' build-fuzz/meson-logs/testlog.txt || true

echo
exec python3 tools/count_tests.py build-test build-asan build-tsan build-fuzz
