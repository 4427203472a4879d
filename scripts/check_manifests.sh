#!/usr/bin/env bash
# The manifests below deploy/kubernetes/, checked against the schemas of Kubernetes, KEDA and the Prometheus Operator. Needs
# kubectl, or `kustomize` in KUSTOMIZE. The tools are in .venv/manifests: they are no dependencies of the server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

setup_env
if [[ ! -x .venv/manifests/bin/kubernetes-validate ]]; then
    step "installing schemas into .venv/manifests"
    "$PYTHON" -m venv .venv/manifests
    "$PYTHON" -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["manifests"], sep="\n")' >.venv/manifests/requirements.txt
    .venv/manifests/bin/python -m pip install -qq --disable-pip-version-check -r .venv/manifests/requirements.txt
fi
for folder in node fleet overlays/cpu overlays/full overlays/cluster; do
    step "deploy/kubernetes/$folder"
    ${KUSTOMIZE:-kubectl kustomize} "deploy/kubernetes/$folder" | .venv/manifests/bin/python scripts/check_manifests.py
done
