#!/usr/bin/env bash
# A bill of materials of the server's dependencies, `sbom.json` (CycloneDX), and the known vulnerabilities among them.
# Usage: bash scripts/audit.sh [--sbom-only|--offline]. The vulnerabilities are asked from PyPI, so that the network is
# needed; the exit status is not 0 if there are any. The tools are in .venv/audit: they are no dependencies of the server.
# --offline needs no network, and ruff as its only tool (extra `dev`): bandit's rules over the source, and a check of
# the dependencies' versions and licenses. run_tests.sh does this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

setup_env
if [[ ${1:-} == --offline ]]; then
    step "audit without a network"
    "$PYTHON" -m ruff check -q server worker models launcher clients scripts
    exec "$PYTHON" scripts/bill_of_materials.py
fi
if [[ ! -x .venv/audit/bin/pip-audit || ! -x .venv/audit/bin/cyclonedx-py ]]; then
    step "installing pip-audit and cyclonedx-bom into .venv/audit"
    "$PYTHON" -m venv .venv/audit
    "$PYTHON" -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["audit"], sep="\n")' >.venv/audit/requirements.txt
    .venv/audit/bin/python -m pip install -qq --disable-pip-version-check -r .venv/audit/requirements.txt
fi
step "writing sbom.json"
.venv/audit/bin/cyclonedx-py environment "$PYTHON" --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.json
[[ ${1:-} == --sbom-only ]] && exit
step "pip-audit"
.venv/audit/bin/pip-audit --progress-spinner off --path "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
