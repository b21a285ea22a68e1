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
. "$(dirname "$0")/soak_parts.sh"
bin=$1
shift
export HOTBUNK_VLLM_CYCLES=${HOTBUNK_VLLM_CYCLES:-200} HOTBUNK_VLLM_KILLS=${HOTBUNK_VLLM_KILLS:-20}
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}
document=${DOCUMENT-docs/conformance.md}

declare -A how=(
    ["in process"]="--backend vllm"
    ["in process, tied"]="--backend vllm --set tied=true"
    ["own process"]="--backend vllm_process"
    ["TP=2"]="--backend vllm --set tensor_parallel_size=2"
    ["DP=2"]="--backend vllm --set data_parallel_size=2"
    ["HTTP"]="--backend vllm_http"
)
IFS=: read -ra deployments <<<"${DEPLOYMENTS:-in process:in process, tied:own process:TP=2:DP=2:HTTP}"

summary() { grep -E '[0-9]+ (pass|fail)' "$1" | tail -n 1; }

for round in $(seq "${ROUNDS:-1}"); do
    found=()
    for name in "${deployments[@]}"; do
        if [ -z "${how[$name]:-}" ]; then
            echo "no deployment '$name'; there are: ${!how[*]}" >&2
            exit 2
        fi
        out="$logs/$round-${name//[^A-Za-z0-9]/-}" # no "=": see below
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

finish
