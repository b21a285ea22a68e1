# Sourced by the soaks: parts that are timed, each with its log, and an end.
#
# `part NAME COMMAND...` says how long it took and the last line of `summary LOG`. One that fails does not
# keep the others from running; `finish` then ends with status 1 and names the folder of the logs.
set -um # -m: each part is a job of its own, which a signal to us does not reach
logs=$(mktemp -d "${TMPDIR:-/tmp}/hotbunk-soak.XXXXXX")
failed=0
running=""

summary() { tail -n 1 "$1"; }

part() {
    local name=$1 began=$SECONDS log code=0
    shift
    log="$logs/${name//[^A-Za-z0-9=]/-}.log"
    "$@" >"$log" 2>&1 </dev/null &
    running=$!
    wait "$running" || code=$?
    running=""
    printf '%-28s %6d s  %s\n' "$name" $((SECONDS - began)) "$(summary "$log")"
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

finish() {
    echo "in all $SECONDS s; $failed parts failed"
    if [ "$failed" -ne 0 ]; then
        echo "the logs are in $logs"
        exit 1
    fi
    rm -r "$logs"
}
