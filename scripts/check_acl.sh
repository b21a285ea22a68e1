#!/usr/bin/env bash
# Hold what csrc/pool/acl_api.h declares of Ascend's ACL against the headers in the torch-npu wheel.
# The headers are fetched into a temporary folder and never kept. Where they cannot be had nothing is
# compared, and that is a failure: a check that did not take place says nothing.
#   scripts/check_acl.sh [WHEEL-OR-FOLDER-OF-HEADERS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=${1:-}
if [ -z "$source" ]; then
    # Its newest build for any Python: only headers are wanted of it.
    if ! timeout 240 "$python" -m pip download -qq --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
        -d "$work" torch-npu >"$work/log" 2>&1; then
        echo "check_acl: not compared: the torch-npu wheel cannot be had here:" >&2
        tail -n 2 "$work/log" >&2
        exit 1
    fi
    source=$(echo "$work"/torch_npu-*.whl)
fi
include=$source
if [ -f "$source" ]; then
    "$python" -m zipfile -e "$source" "$work/wheel"
    include=$work/wheel/torch_npu/include
    header=$(find "$work/wheel" -path '*/acl/acl_rt.h' -print -quit)
    if [ -z "$header" ]; then
        echo "check_acl: not compared: $(basename "$source") holds no acl/acl_rt.h" >&2
        exit 1
    fi
    include=$(dirname "$(dirname "$header")")
fi
"${CXX:-c++}" -std=c++17 -fsyntax-only -Wall -Werror -isystem "$include" -isystem "$include/acl" \
    -Icsrc/include csrc/tests/acl_abi.cpp
echo "check_acl: our declarations agree with $(basename "$source")"
