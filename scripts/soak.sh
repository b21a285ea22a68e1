#!/usr/bin/env bash
# Storms, state machines, kills and random faults, far more often than CI has time for.
#
#   scripts/soak.sh PYTEST [ARGS...]
#
# Each part says how long it took. One that fails does not keep the others from running; then the exit
# status is 1, and its output is in the folder that is named at the end.
# ROUNDS (10): of storms and faults. HOTBUNK_FAULTS (60, all there are), HOTBUNK_KILLS (200),
# HOTBUNK_DRILL_FAULTS (200), HOTBUNK_FUZZ_SECONDS (300, three times) and HOTBUNK_CONFORMANCE_ROUNDS (10): how
# much of the rest.
set -um # -m: each part is a job of its own, which a signal to us does not reach
pytest=$1
shift
rounds=${ROUNDS:-10}
export HOTBUNK_FAULTS=${HOTBUNK_FAULTS:-60} HOTBUNK_KILLS=${HOTBUNK_KILLS:-200}
export HOTBUNK_DRILL_FAULTS=${HOTBUNK_DRILL_FAULTS:-200} HOTBUNK_FUZZ_SECONDS=${HOTBUNK_FUZZ_SECONDS:-300}
logs=$(mktemp -d "${TMPDIR:-/tmp}/hotbunk-soak.XXXXXX")
failed=0
running=""

part() { # part NAME ARGS...
    local name=$1 began=$SECONDS log code=0
    shift
    log="$logs/${name// /-}.log"
    "$pytest" -q "$@" >"$log" 2>&1 &
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

for round in $(seq "$rounds"); do
    part "storms $round" tests/integration/test_reference_storm.py tests/integration/test_reference_steps.py \
        tests/integration/test_state_machine_reference.py \
        tests/integration/test_conformance_reference.py tests/unit/test_state_machine_oracle.py "$@"
    part "faults $round" tests/integration/shm "$@"
done
part kills tests/unit/test_process_supervision.py -k random --timeout=900 "$@"
HOTBUNK_CONFORMANCE_ROUNDS=${HOTBUNK_CONFORMANCE_ROUNDS:-10} \
    part conformance tests/integration/test_conformance_soak.py "$@"
part drill tests/integration/test_sync_drill.py "$@"
part fuzz tests/integration/server/test_fuzz.py "$@"

echo "in all $SECONDS s; $failed parts failed"
if [ "$failed" -ne 0 ]; then
    echo "the logs are in $logs"
    exit 1
fi
rm -r "$logs"
