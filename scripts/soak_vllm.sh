#!/usr/bin/env bash
# Every deployment of vLLM through the whole suite, then cycles, kills and training jobs, on real vLLM.
#
#   scripts/soak_vllm.sh BIN [PYTEST_ARGS...]      (make soak ENGINE=vllm)
#
# Each part says how long it took; one that fails does not keep the others from running. What the suite
# found is written into docs/conformance.md.
# ROUNDS (1): of everything. LEVEL (all): of the suite. DEPLOYMENTS (all six, names below): which.
# HOTBUNK_VLLM_CYCLES (200): of sleep, update and wake. HOTBUNK_VLLM_KILLS (20). DOCUMENT: another than
# docs/conformance.md; empty: none.
set -um # -m: each part is a job of its own, which a signal to us does not reach
bin=$1
shift
export HOTBUNK_VLLM_CYCLES=${HOTBUNK_VLLM_CYCLES:-200} HOTBUNK_VLLM_KILLS=${HOTBUNK_VLLM_KILLS:-20}
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}
document=${DOCUMENT-docs/conformance.md}
logs=$(mktemp -d "${TMPDIR:-/tmp}/hotbunk-soak.XXXXXX")
failed=0
running=""

declare -A how=(
    ["in process"]="--backend vllm"
    ["in process, tied"]="--backend vllm --set tied=true"
    ["own process"]="--backend vllm_process"
    ["TP=2"]="--backend vllm --set tensor_parallel_size=2"
    ["DP=2"]="--backend vllm --set data_parallel_size=2"
    ["HTTP"]="--backend vllm_http"
)
IFS=: read -ra deployments <<<"${DEPLOYMENTS:-in process:in process, tied:own process:TP=2:DP=2:HTTP}"

part() { # part NAME COMMAND...
    local name=$1 began=$SECONDS log code=0
    shift
    log="$logs/${name//[^A-Za-z0-9=]/-}.log"
    "$@" >"$log" 2>&1 </dev/null &
    running=$!
    wait "$running" || code=$?
    running=""
    printf '%-28s %6d s  %s\n' "$name" $((SECONDS - began)) "$(grep -E '[0-9]+ (pass|fail)' "$log" | tail -n 1)"
    if [ "$code" -ne 0 ]; then
        failed=$((failed + 1))
    fi
}

stop() {
    trap - INT TERM
    if [ -n "$running" ]; then
        kill -INT -- "-$running"
        wait "$running"
    fi
    echo "stopped; the logs are in $logs"
    exit 130
}
trap stop INT TERM

for round in $(seq "${ROUNDS:-1}"); do
    found=()
    for name in "${deployments[@]}"; do
        if [ -z "${how[$name]:-}" ]; then
            echo "no deployment '$name'; there are: ${!how[*]}" >&2
            exit 2
        fi
        out="$logs/$round-${name//[^A-Za-z0-9=]/-}"
        # shellcheck disable=SC2086 - words
        part "$name $round" "$bin/hotbunk" conformance ${how[$name]} --level "${LEVEL:-all}" \
            --seed "$round" --out "$out"
        if [ -f "$out/matrix.json" ]; then
            found+=("$name=$out")
        fi
    done
    if [ -n "$document" ] && [ "${#found[@]}" -gt 0 ]; then
        part "table $round" "$bin/python" -m hotbunk.conformance.recorded "$document" "${found[@]}"
    fi
    part "cycles and kills $round" "$bin/pytest" -q tests/engines/vllm/test_cycles.py "$@"
    part "slow tests $round" "$bin/pytest" -q tests/engines/vllm -m slow \
        --ignore tests/engines/vllm/test_cycles.py "$@"
done

echo "in all $SECONDS s; $failed parts failed"
if [ "$failed" -ne 0 ]; then
    echo "the logs are in $logs"
    exit 1
fi
rm -r "$logs"
