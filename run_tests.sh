#!/usr/bin/env bash
# Lint, format check and all tests; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

# Tests start a hundred processes: each finds the modules compiled that the one before it has imported.
unset PYTHONDONTWRITEBYTECODE
setup_env dev
ensure_compiler
ensure_chromium
step "ruff check"
"$PYTHON" -m ruff check .
step "ruff format --check"
"$PYTHON" -m ruff format --check .
# Tests marked `alone` keep real time and have the machine to themselves; with arguments either half may hold none.
NO_TESTS=5
run_pytest() {
    local status=0
    step "pytest -m '$1'"
    "$PYTHON" -m pytest -q -m "$@" || status=$?
    [[ $status -eq $NO_TESTS ]] && ((++empty)) && return
    ((status == 0)) || failed=$status
}
empty=0 failed=0
run_pytest "not alone" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
run_pytest alone "$@"
((empty < 2)) || fail "no test was run"
exit "$failed"
