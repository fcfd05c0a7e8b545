#!/bin/sh
# The same fine-tunes with PyTorch and with Spillway: a GPT-2 of 4 layers, 256 wide, T = 256, batch 4, 20 steps, and a
# small model of each family; and LoRA adapters beside peft. Compares loss and gradient norm step by step, then loads
# the exported model with transformers and compares its loss; and compares the tokens of `spillway generate`. `--write`
# also keeps PyTorch's values in tests/references/, which the tests compare with; `--only llama` takes the models with
# that in their names.
#
# Needs network access once: PyTorch goes into a virtual environment in build/venv-peers (or VENV=DIR is used as it is).
set -eu
cd "$(dirname "$0")/.."
tools/install_packages.sh

venv=${VENV:-$PWD/build/venv-peers}
[ -f build/build.ninja ] || meson setup build --buildtype=release -Dtests=disabled >/dev/null
ninja -C build --quiet tools/spillway
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet torch transformers peft safetensors numpy
fi
for peer in compare generate; do
  "$venv/bin/python" bench/peers/$peer.py --spillway build/tools/spillway --work build/compare-pytorch \
    --references tests/references "$@"
done
