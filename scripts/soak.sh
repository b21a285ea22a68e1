#!/usr/bin/env bash
# Storms, state machines, kills and random faults, far more often than CI has time for.
#
#   scripts/soak.sh PYTEST [ARGS...]
#
# Each part says how long it took. One that fails does not keep the others from running; then the exit
# status is 1, and its output is in the folder that is named at the end.
# ROUNDS (10): of storms and faults. HOTBUNK_FAULTS (63, all there are), HOTBUNK_KILLS (200),
# HOTBUNK_DRILL_FAULTS (200), HOTBUNK_FUZZ_SECONDS (300, three times) and HOTBUNK_CONFORMANCE_ROUNDS (10): how
# much of the rest.
. "$(dirname "$0")/soak_parts.sh"
pytest=$1
shift
rounds=${ROUNDS:-10}
export HOTBUNK_FAULTS=${HOTBUNK_FAULTS:-63} HOTBUNK_KILLS=${HOTBUNK_KILLS:-200}
export HOTBUNK_DRILL_FAULTS=${HOTBUNK_DRILL_FAULTS:-200} HOTBUNK_FUZZ_SECONDS=${HOTBUNK_FUZZ_SECONDS:-300}

for round in $(seq "$rounds"); do
    part "storms $round" "$pytest" -q tests/integration/test_reference_storm.py tests/integration/test_reference_steps.py \
        tests/integration/test_state_machine_reference.py \
        tests/integration/test_conformance_reference.py tests/unit/test_state_machine_oracle.py "$@"
    part "faults $round" "$pytest" -q tests/integration/shm "$@"
done
part "faults elsewhere" "$pytest" -q tests/integration/test_sync_faults_between_processes.py "$@"
part kills "$pytest" -q tests/unit/test_process_supervision.py -k random --timeout=900 "$@"
HOTBUNK_CONFORMANCE_ROUNDS=${HOTBUNK_CONFORMANCE_ROUNDS:-10} \
    part conformance "$pytest" -q tests/integration/test_conformance_soak.py "$@"
part drill "$pytest" -q tests/integration/test_sync_drill.py "$@"
part fuzz "$pytest" -q tests/integration/server/test_fuzz.py "$@"

finish
