#!/usr/bin/env bash
# Sets up what is missing, then has a conversation with the model over a short sound; arguments replace it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

setup_env
step "a conversation with the embedded tiny checkpoint (random weights: what it says is noise)"
if [[ $# -eq 0 ]]; then
    mkdir -p tmp
    set -- assets/ref_audio/default.wav --set force_listen_count=0 --out tmp/reply.wav --transcript tmp/reply.json
fi
exec "$PYTHON" -m worker.offline "$@"
