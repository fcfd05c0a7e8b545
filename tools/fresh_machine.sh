#!/bin/sh
# Runs the README's two commands, as they stand there, as somebody would who has just installed Debian 12: makes a bare
# root (debootstrap's minbase with git and python3) in build-fresh/, clones this checkout's last commit into it, and
# runs them in there, with what they install from this machine's own apt sources and pip configuration. Then the Python
# package is installed from the clone, and used. As root.
#
# The compiler's cache of this machine is theirs, too: what tools/test.sh has compiled here is not compiled once more.
# A header that is missing there is still missed, since ccache compares all of them.
#
#   tools/fresh_machine.sh [--cuda] [COMMAND...]
#
#   --cuda      binds this machine's CUDA toolkit in, which a bare Debian has not
#   COMMAND...  to be run in the clone in place of the README's, each a line for the shell
#
# Ends as the first command that fails. All of it happens in a mount namespace, which ends with the last process in it,
# and every process in there ends with this one, SIGKILL included; so no mount is left behind. The root is removed at
# the end, and one that a killed run has left, at the next start.
set -eu
cd "$(dirname "$0")/.."
checkout=$PWD
root=$checkout/build-fresh
release=bookworm

fail() { echo "fresh_machine.sh: $*" >&2; exit 1; }

# ---- In namespaces of its own, as the first process there.

copy() {  # files or directories of this machine, where it has them
  for path; do
    [ ! -e "$path" ] || cp -aL --parents "$path" "$root"
  done
}

make_root() {
  mirror=$(apt-get indextargets --format "\$(SITE) \$(COMPONENT)" "Created-By: Packages" |
    sed -n 's, main$,,p' | grep -v security | head -n 1)
  echo "== a bare Debian of $release from ${mirror:=http://deb.debian.org/debian}"
  mkdir -p "$root"
  debootstrap --variant=minbase --include=ca-certificates,git,python3 "$release" "$root" "$mirror" \
    >"$root/made" 2>&1 || {
    tail -n 20 "$root/made" >&2
    fail "debootstrap failed"
  }
  rm "$root/made" "$root/etc/apt/sources.list"
  copy /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/auth.conf.d /etc/apt/trusted.gpg.d /etc/apt/keyrings \
    /etc/ssl/certs/ca-certificates.crt /etc/pip.conf /root/.config/pip /root/.pip /etc/resolv.conf /etc/hosts \
    "${SSL_CERT_FILE:-}" "${PIP_CERT:-}" "${PIP_CONFIG_FILE:-}"
  apt-config dump Acquire >"$root/etc/apt/apt.conf.d/99machine"
}

bind() {  # a directory of this machine, with what is mounted in it, and another name for it
  mkdir -p "$root${2:-$1}"
  mount --rbind "$1" "$root${2:-$1}"
}

if [ "${1:-}" = --inside ]; then
  cuda=$2 cache=$3
  shift 3
  make_root
  git clone -q --no-local "$checkout" "$root/root/spillway"
  if [ $# -gt 0 ]; then
    printf '%s\n' "$@" >"$root/root/commands"
  else  # the first block of code under that heading
    awk '/^## /{here = /Two commands/} here && /^```/{fence++; next} here && fence == 1 {sub(/ *#.*/, ""); print}' \
      "$root/root/spillway/README.md" >"$root/root/commands"
    [ "$(wc -l <"$root/root/commands")" -eq 2 ] || fail "README.md does not name two commands under \"Two commands\""
    # As tools/test.sh compiles, in a directory of the checkout, so that ccache has it. PyTorch is Debian's.
    cat >>"$root/root/commands" <<'END'
. tools/compiler_cache.sh
python3 -m venv --system-site-packages /root/venv
/root/venv/bin/pip install -q --upgrade pip  # Debian's takes no -C
/root/venv/bin/pip install -q . -Cbuild-dir=build-pip -Csetup-args=-Dgpu_arch=80 \
  -Csetup-args=-Dunity=on -Csetup-args=-Dunity_size=9 -Csetup-args=-Dcpp_args=--param=ggc-min-heapsize=1000000
cd /root && venv/bin/python spillway/tools/try_package.py
venv/bin/python spillway/examples/adamw_loop.py --text spillway/LICENSE --store store --width 64 --layers 2 \
  --context 32 --steps 40
END
  fi
  bind /dev
  bind /sys
  # `umount` of debootstrap's: a process table is of a namespace of processes.
  umount "$root/proc" 2>/dev/null || true
  mount -t proc proc "$root/proc"
  [ -z "$cuda" ] || bind "$cuda"
  bind "$cache" /root/.ccache
  # Nothing of this machine's environment but how packages are reached. The shell shows each command before it runs it.
  # shellcheck disable=SC2046
  exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 CCACHE_DIR=/root/.ccache \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${cuda:+:$cuda/bin} \
    $(env | grep -E '^(PIP_[A-Z_]*|SSL_CERT_FILE|[a-z]+_proxy|[A-Z]+_PROXY|SPILLWAY_[A-Z_]*)=[^ ]+$') \
    sh -c 'cd /root/spillway && exec sh -ev /root/commands'
fi

# ---- Outside.

cuda=""
if [ "${1:-}" = --cuda ]; then
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  [ -x "$nvcc" ] || fail "there is no nvcc on this machine; leave --cuda out"
  cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  shift
fi
case "${1:-}" in -*) fail "$1 is no option; --cuda is the only one" ;; esac
[ "$(id -u)" -eq 0 ] || fail "only root makes a root directory and mounts; run it with sudo"
tools/install_packages.sh --only ccache debootstrap git util-linux mount
cache=$(ccache --get-config cache_dir)
mkdir -p "$cache"

exec 9<tools/fresh_machine.sh
flock -n 9 || fail "another one is at work in this checkout; wait for its end"

inside=""
clean() {
  trap '' HUP INT TERM
  if [ -n "$inside" ]; then
    kill -KILL "$inside" 2>/dev/null || true
    wait "$inside" 2>/dev/null || true
  fi
  for pause in 1 2 4 8; do  # the kernel may still be ending what ran in there
    rm -rf --one-file-system "$root" 2>/dev/null && return
    sleep "$pause"
  done
  rm -rf --one-file-system "$root"
}
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
rm -rf --one-file-system "$root"
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child \
  "$checkout/tools/fresh_machine.sh" --inside "$cuda" "$cache" "$@" &
inside=$!
status=0
wait "$inside" || status=$?
inside=""
exit "$status"
