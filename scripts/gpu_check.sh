#!/usr/bin/env bash
# Everything of hotbunk that needs an NVIDIA GPU, in one run of at most 8 minutes. It uses what this
# machine has: Python with torch, a C++ compiler, cmake or make, and nvcc. Without nvcc the kernels' rows
# say "skipped"; without transformers the engine's does.
# Nothing is downloaded or installed, and the checkout is left as it was. Without a GPU it says so and exits 0.
#   PYTHON=python3  the interpreter that has torch
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo 'no NVIDIA GPU on this machine: nothing to check'
    exit 0
fi
nvidia-smi -L
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! "$python" -c 'import torch; assert torch.cuda.is_available()'; then
    echo "$python has no torch that sees the GPU; set PYTHON" >&2
    exit 1
fi

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
mkdir "$work/native"
limit=470 # seconds in all; a build has at most half of them
if command -v cmake >/dev/null; then
    cmake -S csrc -B "$work/build" -DCMAKE_BUILD_TYPE=Release >"$work/log" 2>&1 &&
        timeout $((limit / 2)) cmake --build "$work/build" --parallel 8 >>"$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
    cp "$work"/build/libhotbunk_native.so "$work/native/"
    cp "$work"/build/*.fatbin "$work/native/" 2>/dev/null || true
else # the same, by hand
    timeout $((limit / 2)) make -f scripts/gpu_check.mk OUT="$work/native" NVCC="$nvcc" >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
fi
[ -n "$nvcc" ] || echo 'no nvcc here: the CUDA kernels are left out'
# The package as a folder of links, with the library that was just built.
mkdir "$work/hotbunk"
for entry in src/hotbunk/*; do
    name=$(basename "$entry")
    [ "$name" = _native ] || ln -s "$(readlink -f "$entry")" "$work/hotbunk/$name"
done
ln -s "$work/native" "$work/hotbunk/_native"
extra=
if ! "$python" -c 'import msgspec' 2>/dev/null; then
    echo "$python has no msgspec: a stand-in for its structs is used"
    extra=:scripts/stand_in
fi
PYTHONPATH=$work$extra PYTHONDONTWRITEBYTECODE=1 timeout $((limit - SECONDS)) "$python" scripts/gpu_check.py "$@"
