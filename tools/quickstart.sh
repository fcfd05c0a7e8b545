#!/bin/sh
# From a fresh clone to a language model that trains with its weights, gradients and Adam states on NVMe, in one
# command: installs the packages, builds into build/, trains a byte-level GPT-2 of about 30 million parameters on the
# licence texts of this machine, then shows that where the tensors live does not change a bit. Everything it makes lies
# in build/. It trains on the CPU, where RAM stands for GPU memory, also on a machine with a GPU.
set -eu
cd "$(dirname "$0")/.."
if command -v apt-get >/dev/null; then
  tools/install_packages.sh
else
  tools/install_packages.sh || echo "quickstart: going on with what is installed" >&2  # it has named what is needed
fi
. tools/compiler_cache.sh
set -- /usr/share/common-licenses/*
[ -e "$1" ] || set -- "$PWD/LICENSE"  # not a Debian

echo "== build"
# As tools/test.sh builds, so that the second of the two finds the first one's objects in the compiler's cache.
[ -f build/build.ninja ] || meson setup build -Dtests=disabled -Dbuildtype=release -Dgpu_arch=80 \
  -Dunity=on -Dunity_size=9 -Dcpp_args=--param=ggc-min-heapsize=1000000 >/dev/null
ninja -C build --quiet tools/spillway
spillway=$PWD/build/tools/spillway

work=$PWD/build/quickstart
rm -rf "$work"
mkdir -p "$work/nvme" "$work/nvme-small"
cd "$work"

# In lower case and without indentation, so that a run of minutes learns words and not typography.
cat "$@" | tr 'A-Z' 'a-z' | tr -s ' \n' >text
steps=160

config() {  # file, device of weights and states, directory on the drive, section "spillway"
  path=""
  if [ "$2" = nvme ]; then path=", \"nvme_path\": \"$3\""; fi
  cat >"$1" <<JSON
{
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 4e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": $steps, "warmup_max_lr": 4e-4, "warmup_num_steps": 10, "warmup_type": "linear"}
  },
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "$2"$path},
    "offload_optimizer": {"device": "$2"$path}
  },
  "spillway": {"device": "host", $4}
}
JSON
}

echo "== the main job: 30 M parameters, 12 bytes each, through 64 MiB of HBM and 128 MiB of host memory"
"$spillway" init-model model --layers 6 --width 640 --heads 10 --vocab 256 --context 64
config ds_config.json nvme "$work/nvme" '"hbm_bytes": "64MiB", "host_bytes": "128MiB", "tile_elements": 1048576'
"$spillway" finetune --config ds_config.json --model model --data text --seq 64 --steps $steps --out trained \
  --log steps.jsonl
python3 - <<'PYTHON'
import json
steps = [json.loads(line) for line in open("steps.jsonl")]
last = sum(step["loss"] for step in steps[-10:]) / 10
print(f"loss {steps[0]['loss']:.3f} at step 1, {last:.3f} over the last ten of {len(steps)} steps,"
      f" {sum(step['seconds'] for step in steps):.0f} s of training")
if last >= 2.6:
    raise SystemExit("quickstart: the loss should have fallen below 2.6; see build/quickstart/steps.jsonl")
PYTHON

echo "== the same bits: everything in HBM, then everything on NVMe"
"$spillway" init-model small --layers 4 --width 128 --heads 4 --vocab 256 --context 64 >/dev/null
config hbm.json none "" '"tile_elements": 65536'
config nvme.json nvme "$work/nvme-small" '"tile_elements": 65536, "host_bytes": "16MiB"'
for layout in hbm nvme; do
  "$spillway" finetune --config $layout.json --model small --data text --seq 64 --steps 6 --out $layout \
    >$layout.log 2>&1 \
    || { cat $layout.log; exit 1; }
  sed -n 's/^weights and states at home: /  /p' $layout.log
  hash=$(sha256sum <$layout/model.safetensors | cut -d' ' -f1)
  echo "$hash  trained in $layout"
  [ "${first:=$hash}" = "$hash" ] || { echo "quickstart: the two models differ" >&2; exit 1; }
done
echo "done; the trained model is in build/quickstart/trained, and its store in build/quickstart/nvme"
