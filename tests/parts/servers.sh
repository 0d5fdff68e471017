# Servers of a script: sourced by it. It sets `work`, a folder, and has `fail MESSAGE`.

readonly READY_S=10
pids=()

clean_up() {
    local pid
    for pid in "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
        # One that is frozen does not see that.
        kill -CONT "$pid" 2>/dev/null || true
    done
    wait || true
    [[ -z $work ]] || rm -rf "$work"
}

# A port below those that systems hand out by themselves.
port() {
    echo $((20000 + RANDOM % 12000))
}

# A server that may find its port taken: start NAME READY COMMAND...; each {port} is another one's.
# `port_of_NAME` is its port then.
start() {
    local name=$1 ready=$2 attempt number deadline
    shift 2
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        number=$(port)
        "${@//\{port\}/$number}" >"$work/$name.log" 2>&1 &
        pids+=($!)
        deadline=$((SECONDS + READY_S))
        while kill -0 $! 2>/dev/null && ((SECONDS < deadline)); do
            if grep -qs -- "$ready" "$work/$name.log"; then
                printf -v "port_of_$name" '%s' "$number"
                return
            fi
            sleep 0.05
        done
        kill $! 2>/dev/null || true
    done
    cat "$work/$name.log" >&2
    fail "$name did not start"
}

# The program that tests have, which is built by now.
tidegate_program() {
    cargo test --locked --profile dev --all-features --test envoy --no-run --message-format json |
        sed -n '/"kind":\["bin"\]/s/.*"executable":"\([^"]*\)".*/\1/p'
}
