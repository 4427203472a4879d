#!/usr/bin/env bash
# Sets up what is missing, then chats once with the model; arguments replace the question.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

setup_env
step "chat with the embedded tiny checkpoint (random weights: the answer is noise)"
if [[ $# -eq 0 ]]; then set -- "Hello"; fi
exec "$PYTHON" -m models "$@"
