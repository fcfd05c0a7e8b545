#!/bin/sh
# Tries the wheel of tools/wheel.sh where its users are: on bare Debians without compiler or development packages, with
# the package installed by root and used by somebody who may not write there. As root of this machine.
#
#   tools/try_wheel.sh WHEEL [SUITE...]     SUITE: bookworm trixie bullseye, if none is said
#
#   bookworm  glibc 2.36, Python 3.11, PyTorch 1.13    a model trains (tools/try_package.py), PyTorch imported before
#   trixie    glibc 2.41, Python 3.13, PyTorch 2.6     and after
#   bullseye  glibc 2.31, Python 3.9                   pip refuses that Python
#
# In all of them the program fine-tunes, the library loads, and LD_DEBUG=libs says what of the system's they load: it
# fails for more than glibc's own, libgcc_s, and libstdc++ for oneDNN in the program.
#
# Each root is made by debootstrap in build-try/ and removed at the end. Older ones are in no mirror of Debian's: that
# nothing newer than glibc 2.28 is asked for is what auditwheel checks when the wheel is made.
set -eu
cd "$(dirname "$0")/.."
checkout=$PWD
fail() { echo "try_wheel.sh: $*" >&2; exit 1; }

if [ "${1:-}" != --inside ]; then
  [ $# -ge 1 ] && [ -f "$1" ] || { sed -n '5p' "$0" >&2; exit 2; }
  [ "$(id -u)" -eq 0 ] || fail "only root makes a root directory and mounts; run it with sudo"
  tools/install_packages.sh --only debootstrap util-linux mount
  wheel=$(readlink -f "$1")
  shift
  [ $# -gt 0 ] || set -- bookworm trixie bullseye
  for suite; do
    rm -rf --one-file-system "build-try/$suite"
    status=0
    setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child "$0" --inside "$suite" "$wheel" || status=$?
    rm -rf --one-file-system "build-try/$suite"
    [ "$status" -eq 0 ] || fail "$suite: $status"
  done
  exit 0
fi

suite=$2 wheel=$3 root=$checkout/build-try/$2
torch=python3-torch
[ "$suite" != bullseye ] || torch=""
mirror=$(apt-get indextargets --format "\$(SITE) \$(COMPONENT)" "Created-By: Packages" |
  sed -n 's, main$,,p' | grep -v security | head -n 1)
echo "== $suite"
mkdir -p "$root"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" "$root" \
  "${mirror:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
  { tail -n 20 "$root.log" >&2; fail "debootstrap failed"; }
for path in /etc/resolv.conf /etc/hosts /etc/pip.conf /root/.config/pip "${SSL_CERT_FILE:-}" "${PIP_CERT:-}"; do
  [ ! -e "$path" ] || cp -aL --parents "$path" "$root"
done
apt-config dump Acquire >"$root/etc/apt/apt.conf.d/99machine"
cp "$wheel" tools/try_package.py "$root/opt/"
mount --rbind /dev "$root/dev"
umount "$root/proc" 2>/dev/null || true
mount -t proc proc "$root/proc"

cat >"$root/opt/as_root" <<INSIDE
set -eu
[ -z "$torch" ] || apt-get -q -y install --no-install-recommends $torch >/opt/apt.log 2>&1 ||
  { tail -n 20 /opt/apt.log; exit 1; }
for compiler in cc gcc g++ clang make ld; do
  ! command -v \$compiler || { echo "there is a compiler: \$compiler"; exit 1; }
done
python3 -m venv --system-site-packages /opt/venv
if [ "$suite" = bullseye ]; then
  if /opt/venv/bin/pip install -q --no-deps /opt/spillway-*.whl >/opt/refused 2>&1; then
    echo "pip takes \$(python3 --version)"; exit 1
  fi
  grep -i "requires a different python\|not a supported wheel" /opt/refused
  python3 -m zipfile -e /opt/spillway-*.whl /opt/unpacked
  chmod +x /opt/unpacked/spillway/bin/spillway
else
  /opt/venv/bin/pip install -q --no-deps /opt/spillway-*.whl
fi
useradd --create-home somebody
INSIDE
cat >"$root/opt/as_somebody" <<'INSIDE'
set -eu
cd
package=$(echo /opt/venv/lib/python3*/site-packages/spillway /opt/unpacked/spillway | tr ' ' '\n' |
  while read -r place; do [ ! -d "$place" ] || echo "$place"; done)
if touch "$package/written" 2>/dev/null; then echo "$package can be written"; exit 1; fi
echo "$(ldd --version | head -n 1), $(python3 --version), as $(id -un), $package read-only"

# What of the system's the program and the library load: the policy of manylinux allows glibc's own, libgcc_s and an
# old libstdc++, which oneDNN takes.
loaded() {
  LD_DEBUG=libs "$@" 2>&1 >/dev/null | sed -n 's/.*calling init: //p' | sort -u | grep -v "$package\|/spillway.libs/"
}
loads() {
  echo "loaded by $1:" $(cat)
}
loaded "$package/bin/spillway" --version >system
loads spillway <system
python3 - "$package/lib/libspillway.so.0" >ctypes 2>&1 <<'PYTHON'
import ctypes, os, re, sys
before = set(re.findall(r"/\S+\.so\S*", open("/proc/self/maps").read()))
library = ctypes.CDLL(sys.argv[1])
library.spillway_version.restype = ctypes.c_char_p
after = set(re.findall(r"/\S+\.so\S*", open("/proc/self/maps").read())) - before
print("\n".join(path for path in after if "spillway" not in path))
PYTHON
loads libspillway.so <ctypes
policy='/\(libc\|libm\|libpthread\|libdl\|librt\|libgcc_s\|libstdc++\|ld-linux-x86-64\)[.-]'
if cat system ctypes | grep . | grep -v "$policy"; then
  echo "that is not of the policy"; exit 1
fi

if [ -x /opt/venv/bin/spillway ]; then
  for first in "" --spillway-first; do
    /opt/venv/bin/python /opt/try_package.py $first >tried 2>&1 || { cat tried; exit 1; }
    grep -v '^spillway: ' tried
  done
fi
"$package/bin/spillway" init-model model --layers 2 --width 64 --heads 4 --vocab 256 --context 64 >/dev/null
cat >config.json <<JSON
{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$PWD/nvme"},
                       "offload_optimizer": {"device": "nvme", "nvme_path": "$PWD/nvme"}}}
JSON
cat /usr/share/common-licenses/GPL-3 >text
"$package/bin/spillway" finetune --config config.json --model model --data text --seq 64 --steps 20 --out trained \
  >said 2>&1 || { cat said; exit 1; }
grep '^step 1/\|^step 20/' said
INSIDE
chroot "$root" env -i HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  sh /opt/as_root
exec setpriv --pdeathsig KILL chroot --userspec=somebody:somebody "$root" env -i HOME=/home/somebody LANG=C.UTF-8 \
  PATH=/usr/bin:/bin sh /opt/as_somebody
