#!/bin/sh
# Installs what Spillway is built from on Debian 12 (as root, or through sudo). Does nothing, and needs no network, when
# every package is there. Quiet unless it fails. Arguments are further packages.
set -eu

# dpkg-dev: Meson asks it for the directory of libraries, in which the dynamic linker and CMake look on Debian.
packages="g++ dpkg-dev ccache meson ninja-build pkg-config python3 util-linux mount e2fsprogs xfsprogs btrfs-progs
  liburing-dev libaio-dev libhwloc-dev libtbb-dev libhwy-dev libdnnl-dev rapidjson-dev libcli11-dev libfmt-dev
  libxxhash-dev libzip-dev libgtest-dev libgmock-dev libbenchmark-dev $*"
if [ "${1:-}" = --only ]; then
  shift
  packages=$*
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_packages.sh: this system has no apt; install these by its own means:" $packages >&2
  exit 1
fi

missing=""
for package in $packages; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=""
  [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

as_root=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install_packages.sh: root or sudo is needed to install:$missing" >&2; exit 1; }
  as_root=sudo
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT

apt() {
  # Through env, because sudo drops the environment.
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 "$@" >>"$log" 2>&1
}

echo "installing:$missing"
# A fresh container has no package lists, an old one has stale lists: the second attempt brings new ones.
if ! apt install --no-install-recommends $missing; then
  for attempt in 1 2 3; do
    if apt update && apt install --no-install-recommends $missing; then exit 0; fi
    sleep "$attempt"
  done
  cat "$log" >&2
  echo "install_packages.sh: these packages could not be installed:$missing" >&2
  exit 1
fi
