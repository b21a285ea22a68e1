#!/usr/bin/env bash
# verl's whole jobs, again and again, with syncs that fail at random in each trainer mode.
#
#   scripts/soak_verl.sh BIN [ARGS...]    BIN: of the environment that has verl
#
# ROUNDS (3): of all slow jobs. HOTBUNK_VERL_SEEDS (10): random jobs of each mode, before them. A part that
# fails does not keep the others from running; then the exit status is 1, and its output is in the folder
# that is named at the end.
set -um # -m: each part is a job of its own, which a signal to us does not reach
pytest=$1/pytest
shift
rounds=${ROUNDS:-3}
logs=$(mktemp -d "${TMPDIR:-/tmp}/hotbunk-soak-verl.XXXXXX")
failed=0
running=""

part() { # part NAME ARGS...
    local name=$1 began=$SECONDS log code=0
    shift
    log="$logs/${name// /-}.log"
    "$pytest" -q -m slow "$@" >"$log" 2>&1 &
    running=$!
    wait "$running" || code=$?
    running=""
    printf '%-24s %6d s  %s\n' "$name" $((SECONDS - began)) "$(tail -n 1 "$log")"
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

HOTBUNK_VERL_SEEDS=${HOTBUNK_VERL_SEEDS:-10} part "random faults" tests/engines/verl/test_soak.py "$@"
for round in $(seq "$rounds"); do
    part "jobs $round" tests/engines/verl --ignore=tests/engines/verl/test_soak.py "$@"
done

echo "in all $SECONDS s; $failed parts failed"
if [ "$failed" -ne 0 ]; then
    echo "the logs are in $logs"
    exit 1
fi
rm -r "$logs"
