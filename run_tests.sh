#!/usr/bin/env bash
# Lint, format check, audit without a network, type check and all tests. `--quick` runs the cheapest tests of every folder,
# without those that need a compiler, a browser or flite. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

quick=
for argument; do [[ $argument == --quick ]] && quick=1; done
# Tests start a hundred processes. Compiled modules of one serve the next.
unset PYTHONDONTWRITEBYTECODE
# What is missing is installed at the same time.
beside_setup=()
if [[ -z $quick ]]; then
    ensure_programs &
    beside_setup+=($!)
    setup_stock_clients &
    beside_setup+=($!)
fi
setup_env dev
for one in "${beside_setup[@]}"; do wait "$one"; done
step "ruff check"
"$PYTHON" -m ruff check .
step "ruff format --check"
"$PYTHON" -m ruff format --check .
# Audit, type check and evaluation run beside the tests, which leave part of the cores idle. The type check reads the
# results of earlier checks, also of other checkouts: mypy compares the content of each file. So does Hypothesis, which
# otherwise parses all modules in every process for the constants that it draws.
beside=$(mktemp -d)
trap 'rm -rf "$beside"' EXIT
cache=${XDG_CACHE_HOME:-$HOME/.cache}/duologue-tests
export HYPOTHESIS_STORAGE_DIRECTORY=$cache/hypothesis
declare -A running=()
start_beside() {
    local name=$1
    shift
    nice -n 5 "$@" >"$beside/$name" 2>&1 &
    running[$name]=$!
}
report() {
    step "$1"
    wait "${running[$1]}" || failed=$?
    cat "$beside/$1"
}
start_beside audit bash scripts/audit.sh --offline
start_beside mypy "$PYTHON" -m mypy --cache-dir "$cache/mypy" server worker models launcher clients
bounds=training/evaluate/bounds.json
if [[ $# -eq 0 && -z $quick && -f $bounds ]]; then
    start_beside talker "$PYTHON" -m training.evaluate --model assets/talker --gate --bounds "$bounds"
fi
# Two more processes than cores: tests wait for sockets, browsers and other processes some of the time.
workers=$(($(nproc) + 2))
((workers <= 4)) || workers=4
# Tests marked `alone` measure real time and run without parallel processes. With arguments, either half may be empty.
NO_TESTS=5
run_pytest() {
    local status=0
    step "pytest -m '$1'"
    "$PYTHON" -m pytest -q -m "$@" || status=$?
    [[ $status -eq $NO_TESTS ]] && ((++empty)) && return
    ((status == 0)) || failed=$status
}
empty=0 failed=0
if [[ -n $quick ]]; then
    run_pytest "not alone and not slow and not programs" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
    report audit
    report mypy
    ((empty == 0)) || fail "no test was run"
    exit "$failed"
fi
run_pytest "not alone" -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
report audit
report mypy
[[ -z ${running[talker]:-} ]] || report talker
# Without arguments, only the files that have such tests are collected.
readarray -t alone < <(grep -rl --include='test_*.py' 'mark\.alone' tests)
run_pytest alone "${@:-${alone[@]}}"
((empty < 2)) || fail "no test was run"
exit "$failed"
