#!/usr/bin/env bash
# An environment with a real engine in it: .venv-ENGINE, from engines/ENGINE.txt.
#   scripts/engine_venv.sh ENGINE
# The engine and what it needs (gigabytes) lie outside the checkout, one folder a list and Python,
# shared by all checkouts. hotbunk itself is installed per checkout, so no environment points at
# another checkout. Needs .venv (make venv), which builds the native library.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=${1:?which engine}
list=engines/$engine.txt
if [ ! -f "$list" ]; then
    echo "no engine ${engine@Q}; there are: $(cd engines && ls ./*.txt | sed 's#^\./##; s#\.txt$##' | tr '\n' ' ')" >&2
    exit 2
fi
venv=.venv-$engine
python=$PWD/.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '== %s\n' "$*" >&2; }

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
key=$({ echo "$version"; cat "$list"; } | sha256sum | cut -c1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hotbunk/engines
site=$cache/$engine-$key
stamp=$venv/.made-from-$({ echo "$site $PWD"; cat pyproject.toml "$0"; } | sha256sum | cut -c1-16)
if [ -f "$stamp" ] && [ -d "$site" ]; then
    exit 0
fi

if [ ! -d "$site" ]; then
    say "$list into $site (a few minutes, once)"
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/.making-$engine-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # The list is complete, so nothing is resolved: torch stays the build that it names.
    "$python" -m pip install -qq --no-deps --target "$work/site" -r "$list" >&2
    # In one step, and whoever comes first wins: nobody ever sees half of it.
    mv -T "$work/site" "$site" 2>/dev/null || [ -d "$site" ]
fi

say "$venv"
rm -rf "$venv"
"$python" -m venv "$venv"
# What hotbunk needs comes in the versions of the list. The native library is the one that .venv
# built into the checkout.
HOTBUNK_PURE=1 "$venv/bin/python" -m pip install -qq -c "$list" -e '.[http,test]' >&2
echo "$site" >"$venv/lib/python$version/site-packages/engine.pth"
touch "$stamp"
