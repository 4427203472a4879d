#!/usr/bin/env bash
# Installs what is missing, then starts the gateway and the workers. Arguments are passed on; --help lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

setup_env
exec "$PYTHON" -m launcher "$@"
