#!/bin/sh
# Builds the kernels for AArch64 with Debian's cross compiler and runs their tests under QEMU: on a processor with NEON
# alone, on one with SVE of 512 bits, and on one with SVE2 of 128, 256 and 512. QEMU's results are right to the bit; how
# fast the kernels are there it cannot say. A run takes 6 minutes, most of them in tile_update.
#
# Needs network access once: the libraries come from Debian's arm64 packages, unpacked into build-aarch64/root. The
# system's own apt and dpkg do not learn of that architecture.
set -eu
cd "$(dirname "$0")/.."
tools/install_packages.sh g++-aarch64-linux-gnu qemu-user

build=$PWD/build-aarch64 root=$PWD/build-aarch64/root apt=$PWD/build-aarch64/apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
if [ ! -d "$root" ]; then
  : >"$apt/status"
  arm64() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Debug::NoLocking=1 \
      -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt" "$@" >"$apt/log" 2>&1 ||
      { cat "$apt/log" >&2; exit 1; }
  }
  echo "downloading arm64 libraries"
  arm64 update
  arm64 install --download-only --no-install-recommends $(grep -o '[a-z0-9]*-dev' tools/install_packages.sh)
  for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$root.part"; done
  mv "$root.part" "$root"
fi

if [ ! -f "$build/build.ninja" ]; then
  cat >"$build/cross.ini" <<END
[binaries]
cpp = ['aarch64-linux-gnu-g++', '--sysroot=$root']
ar = 'aarch64-linux-gnu-ar'
strip = 'aarch64-linux-gnu-strip'
pkgconfig = 'pkg-config'
exe_wrapper = ['qemu-aarch64', '-L', '$root']
[properties]
sys_root = '$root'
pkg_config_libdir = ['$root/usr/lib/aarch64-linux-gnu/pkgconfig', '$root/usr/share/pkgconfig']
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'armv8-a'
endian = 'little'
END
  said=$(meson setup "$build" . --cross-file "$build/cross.ini" -Dtests=enabled) || { echo "$said"; exit 1; }
fi

# Not bf16, which goes through all 2^32 numbers and has no vector code, and not what looks at the machine.
programs=""
set --
for test in optimizer reduced_moments optimizer_course fp16 norm convert tile_update workers; do
  programs="$programs tests/kernels/${test}_test"
  set -- "$@" "kernels $test"
done
ninja -C "$build" --quiet $programs

for cpu in cortex-a72 a64fx max,sve128=on max,sve256=on max,sve512=on; do
  echo "== $cpu"
  rm -f "$build"/*.xml "$build/meson-logs/testlog.json"
  QEMU_CPU=$cpu meson test -C "$build" --no-rebuild --timeout-multiplier 10 --print-errorlogs "$@" \
    >"$build/log" 2>&1 || cat "$build/log"
  sed -n 's/.*name="targets" value="\([^"]*\)".*/targets: \1/p' "$build"/*.xml | sort -u
  python3 tools/count_tests.py "$build"
done
