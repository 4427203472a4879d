#!/usr/bin/env bash
# Lint, format check and all tests; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

setup_env dev
ensure_compiler
step "ruff check"
"$PYTHON" -m ruff check .
step "ruff format --check"
"$PYTHON" -m ruff format --check .
step "pytest"
exec "$PYTHON" -m pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"
