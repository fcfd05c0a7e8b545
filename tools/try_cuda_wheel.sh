#!/bin/sh
# Tries both wheels of tools/wheel.sh --cuda together, with NVIDIA's own from PyPI (450 MB), on a machine with or
# without a GPU: the package finds the plugins beside itself, they find cuBLASLt, and where there is no driver, that is
# said.
#
#   tools/try_cuda_wheel.sh SPILLWAY_WHEEL CUDA_WHEEL
set -eu
[ $# -eq 2 ] || { sed -n '6p' "$0" >&2; exit 2; }
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
wheels=$place/wheels
mkdir "$wheels"
cp "$1" "$2" "$wheels"
"$place/venv/bin/pip" install -q --find-links "$wheels" "$wheels/$(basename "$1")[cuda]"
site=$(echo "$place"/venv/lib/python3*/site-packages)
chmod -R a-w "$site"
cd "$place"
# What this machine has of CUDA is not what a user's has: the dynamic linker is told of none, nor of our own builds.
unset LD_LIBRARY_PATH SPILLWAY_LIBRARY
for plugin in libspillway_cuda.so libspillway_models_cuda.so; do
  "$place/venv/bin/python" - "$site/spillway_cuda/lib/$plugin" <<'PYTHON'
import ctypes, re, sys
ctypes.CDLL(sys.argv[1])
print(sys.argv[1].rpartition("/")[2], "loads",
      sorted({path.rpartition("/")[2] for path in re.findall(r"/\S*nvidia\S*\.so\S*", open("/proc/self/maps").read())}))
PYTHON
done
"$place/venv/bin/spillway" doctor --no-probe | grep "cuda"
"$place/venv/bin/spillway" init-model model --layers 2 --width 64 --heads 4 --vocab 256 --context 64 >/dev/null
cat /usr/share/common-licenses/GPL-3 >text
cat >config.json <<'JSON'
{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3},
 "spillway": {"device": "cuda"}}
JSON
finetune() {
  "$place/venv/bin/spillway" finetune --config config.json --model model --data text --seq 64 --steps 3 --out "$1"
}
if finetune trained >said 2>&1; then
  grep '^device\|^step' said
elif [ -e /proc/driver/nvidia/version ]; then
  cat said
  exit 1
else
  grep 'spillway.device: is cuda, and there is none: no NVIDIA driver (libcuda.so.1) was found; ' said
fi
# Without the second wheel that is what is missing, and where it is to be had.
chmod -R u+w "$site"
"$place/venv/bin/pip" uninstall -q -y spillway-cuda
if finetune again >said 2>&1; then exit 1; fi
grep 'libspillway_cuda.so: cannot open shared object file.*; the wheel spillway_cuda of .* brings it' said
