#!/usr/bin/env bash
# verl's whole jobs, again and again, with syncs that fail at random in each trainer mode.
#
#   scripts/soak_verl.sh BIN [ARGS...]    BIN: of the environment that has verl
#
# ROUNDS (3): of all slow jobs. HOTBUNK_VERL_SEEDS (10): random jobs of each mode, before them, and one of each
# with HOTBUNK_VERL_LONG (100) steps. A part that fails does not keep the others from running; then the exit
# status is 1, and its output is in the folder that is named at the end.
. "$(dirname "$0")/soak_parts.sh"
pytest=$1/pytest
shift
rounds=${ROUNDS:-3}

HOTBUNK_VERL_SEEDS=${HOTBUNK_VERL_SEEDS:-10} part "random faults" "$pytest" -q -m slow tests/engines/verl/test_soak.py "$@"
HOTBUNK_VERL_SEEDS=1 HOTBUNK_VERL_FIRST_SEED=1000 HOTBUNK_VERL_STEPS=${HOTBUNK_VERL_LONG:-100} \
    part "long jobs" "$pytest" -q -m slow tests/engines/verl/test_soak.py "$@"
for round in $(seq "$rounds"); do
    part "jobs $round" "$pytest" -q -m slow tests/engines/verl --ignore=tests/engines/verl/test_soak.py "$@"
done

finish
