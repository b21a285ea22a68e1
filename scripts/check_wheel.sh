#!/usr/bin/env bash
# Build what would be published and try each piece where nothing else of this checkout is:
#   sdist -> wheel from the sdist; wheel from the checkout; both must hold the same files;
#   the wheel in a bare environment without torch; the same for the pure wheel (HOTBUNK_PURE=1).
# Leaves the sdist and its wheel in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work/tmp PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir "$TMPDIR"
unset HOTBUNK_PURE PYTHONPATH

say() { printf '== %s\n' "$*"; }

build() { # quiet unless it fails
    if ! "$python" -m build "$@" >"$work/build.log" 2>&1; then
        cat "$work/build.log" >&2
        return 1
    fi
}

only() { # the one file that matches, or an error
    local found=("$@")
    if [ ${#found[@]} -ne 1 ] || [ ! -f "${found[0]}" ]; then
        echo "expected one file, found: $*" >&2
        return 1
    fi
    printf '%s\n' "${found[0]}"
}

names() { "$python" -m zipfile -l "$1" | awk 'NR > 1 {print $1}' | sort; }

say 'sdist, and a wheel from it'
build --outdir "$work/dist" .
sdist=$(only "$work"/dist/hotbunk-*.tar.gz)
wheel=$(only "$work"/dist/hotbunk-*.whl)
case $wheel in
*-py3-none-any.whl) echo "the wheel claims to be pure: $wheel" >&2; exit 1 ;;
*-py3-none-*.whl) ;;
*) echo "unexpected tags: $wheel" >&2; exit 1 ;;
esac

say 'a wheel from the checkout'
build --wheel --outdir "$work/tree" .
diff <(names "$wheel") <(names "$(only "$work"/tree/hotbunk-*.whl)") || {
    echo 'the wheel from the sdist and the wheel from the checkout hold different files' >&2
    exit 1
}

say 'a pure wheel'
HOTBUNK_PURE=1 build --wheel --outdir "$work/pure" .
pure=$(only "$work"/pure/hotbunk-*-py3-none-any.whl)
diff <(names "$wheel" | grep -v '/_native/') <(names "$pure") || {
    echo 'the pure wheel differs by more than the native library' >&2
    exit 1
}

say 'what the wheel and the sdist hold'
names "$wheel" >"$work/names"
for wanted in py.typed rollout/__init__.py checkpoint_engine/__init__.py trainer_hooks/__init__.py \
    configs/__init__.py benchmarks/__init__.py conformance/__init__.py cli/__init__.py \
    _native/libhotbunk_native.so; do
    grep -qx "hotbunk/$wanted" "$work/names" || { echo "not in the wheel: hotbunk/$wanted" >&2; exit 1; }
done
if grep -E 'fake_cuda|pool_test' "$work/names"; then
    echo 'in the wheel by mistake: what belongs to the tests' >&2
    exit 1
fi
# Drivers are opened when asked for: one wheel serves machines with and without them.
"$python" -m zipfile -e "$wheel" "$work/opened"
if command -v readelf >/dev/null &&
    readelf -d "$work/opened/hotbunk/_native/libhotbunk_native.so" | grep NEEDED | grep -Ei 'cuda|ascend|torch|python'; then
    echo 'the native library is linked against a driver' >&2
    exit 1
fi
# The CUDA kernels ship where they could be compiled.
if command -v nvcc >/dev/null; then
    grep -qx hotbunk/_native/hotbunk_kernels.fatbin "$work/names" ||
        { echo 'not in the wheel: the CUDA kernels, although there is an nvcc' >&2; exit 1; }
fi
# Every tracked Python, YAML and JSON file of the package's folders must be there.
for folder in rollout checkpoint_engine trainer_hooks configs benchmarks tests/conformance src/hotbunk/cli; do
    find "$folder" -name __pycache__ -prune -o -type f \( -name '*.py' -o -name '*.yaml' -o -name '*.json' \) -print
done | sed -e 's#^tests/conformance#conformance#' -e 's#^src/hotbunk/##' -e 's#^#hotbunk/#' | sort >"$work/wanted"
if missing=$(comm -23 "$work/wanted" "$work/names") && [ -n "$missing" ]; then
    printf 'not in the wheel:\n%s\n' "$missing" >&2
    exit 1
fi
tar tzf "$sdist" | sed 's#^[^/]*/##' | sort >"$work/held"
if stray=$(grep -E '^(\.venv[^/]*|venv|build|dist|runs)/|CMake(Cache|Files|Init)|ninja|\.so$|__pycache__' "$work/held"); then
    printf 'in the sdist by mistake:\n%s\n' "$stray" >&2
    exit 1
fi
if [ -n "$(grep -E '^src/hotbunk/(rollout|configs|conformance)/.' "$work/held")" ]; then
    echo 'the sdist holds files twice, through the links' >&2
    exit 1
fi

try() { # wheel, 1 if it has the native library
    local env=$work/env
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/pip" install -qq "$1"
    cd "$work"
    NATIVE=$2 "$env/bin/python" -I - <<'PY'
import importlib.metadata as metadata
import importlib.util
import os
import subprocess
import sys
import time

heavy = ("torch", "transformers", "numpy")
for name in ("torch", "transformers"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed: the environment is not bare"

took = []
for _ in range(5):
    code = (
        "import sys, time; start = time.perf_counter(); import hotbunk;"
        "print(time.perf_counter() - start);"
        f"loaded = [m for m in {heavy!r} if m in sys.modules]; sys.exit(f'loads {{loaded}}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, text=True, stdout=subprocess.PIPE)
    took.append(float(done.stdout))
assert min(took) < 0.05, f"import hotbunk took {min(took):.3f} s"

import hotbunk
from hotbunk.rollout import native

assert hotbunk.__version__ == metadata.version("hotbunk")
assert "site-packages" in hotbunk.__file__, hotbunk.__file__
if os.environ["NATIVE"] == "1":
    found = native.load()
    assert found.version == hotbunk.__version__, (found.version, hotbunk.__version__)
    assert found.page_size == os.sysconf("SC_PAGESIZE")
    from hotbunk.rollout.contract import Retention
    from hotbunk.rollout.memory import HostPool

    pool = HostPool()
    arena = pool.arena("weights", 1 << 20)
    arena.add("w", 5)
    arena.view()[:5] = b"bytes"
    assert pool.release(["weights"], Retention.BACKUP).resident() == 0
    pool.resume(["weights"])
    assert bytes(arena.view()[:5]) == b"bytes"
    pool.close()
    shown = f"native {found.version}, ABI {found.abi_version}, pages of {found.page_size} bytes"
else:
    assert not native.available()
    try:
        native.load()
    except ImportError as error:
        assert "HOTBUNK_PURE" in str(error), error
    else:
        raise AssertionError("a pure wheel loaded a native library")
    from hotbunk.rollout.contract import Retention
    from hotbunk.rollout.errors import Unsupported
    from hotbunk.rollout.memory import host_pool

    pool = host_pool()
    pool.arena("weights", 1 << 20)
    try:
        pool.release(["weights"], Retention.BACKUP)
    except Unsupported as error:
        assert "HOTBUNK_PURE" in str(error), error
    else:
        raise AssertionError("a pure wheel claims to release")
    shown = "pure"
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, f"hotbunk.rollout.native loads {loaded}"
print(f"   import hotbunk: {min(took) * 1e3:.1f} ms; {shown}")
PY
    "$env/bin/hotbunk" --help >"$work/help" || { cat "$work/help" >&2; return 1; }
    cd "$root"
}

say 'the wheel in a bare environment'
try "$wheel" 1
say 'the pure wheel in a bare environment'
try "$pure" 0

rm -rf dist
mkdir dist
cp "$sdist" "$wheel" dist/
say "dist/: $(cd dist && echo *)"
