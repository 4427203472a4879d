# Sourced from the root folder by the scripts there. Sets $PYTHON to the interpreter of .venv/base, in which it installs
# the dependencies of pyproject.toml. A second call with an unchanged pyproject.toml does nothing.

step() { printf '== %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

PYTHON=.venv/base/bin/python

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found (tried python3, python3.13, python3.12, python3.11)"
}

# setup_env [dev]: with `dev`, also installs the dependencies of the tests, stock clients included.
setup_env() {
    local extra=${1:-} system_python hash stamp
    if [[ ! -x $PYTHON ]]; then
        system_python=$(find_python)
        step "creating .venv/base with $system_python"
        "$system_python" -m venv .venv/base || { rm -rf .venv/base; fail "venv failed; on Debian: apt-get install python3-venv"; }
    fi
    hash=$(sha256sum pyproject.toml | cut -c1-16)
    stamp=.venv/base/.installed-${extra:-run}-$hash
    # The dependencies of the tests include those of the programs.
    [[ -e $stamp || (-z $extra && -e .venv/base/.installed-dev-$hash) ]] && return
    step "installing dependencies from pyproject.toml${extra:+ with [$extra]}"
    "$PYTHON" - "$extra" >.venv/base/requirements.txt <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
names = ["dev", "clients", "webrtc"] if sys.argv[1] == "dev" else []
extras = [package for name in names for package in project["optional-dependencies"].get(name, [])]
print(*project["dependencies"], *extras, sep="\n")
PY
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-compile -r .venv/base/requirements.txt
    # On all cores, which pip does not use. Files for other Python versions fail to compile and are never imported.
    "$PYTHON" -m compileall -qq -j 0 .venv/base/lib || true
    touch "$stamp"
}

# The stock clients of the examples, in .venv/clients: their dependencies are many, and none of the server's.
setup_stock_clients() {
    local hash stamp
    hash=$(sha256sum pyproject.toml | cut -c1-16)
    stamp=.venv/clients/.installed-$hash
    [[ -e $stamp ]] && return
    step "installing stock clients into .venv/clients"
    [[ -x .venv/clients/bin/python ]] || "$PYTHON" -m venv .venv/clients
    "$PYTHON" -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["stock"], sep="\n")' >.venv/clients/requirements.txt
    .venv/clients/bin/python -m pip install -qq --disable-pip-version-check --no-compile -r .venv/clients/requirements.txt
    .venv/clients/bin/python -m compileall -qq -j 0 .venv/clients/lib || true
    touch "$stamp"
}

# torch.compile builds its CPU kernels with a C++ compiler.
ensure_compiler() {
    local name
    for name in "${CXX:-}" g++ clang++; do
        if [[ -n $name ]] && command -v "$name" >/dev/null; then return; fi
    done
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        step "installing g++ (torch.compile needs a C++ compiler)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++ >/dev/null
    else
        fail "no C++ compiler found; torch.compile needs one: install g++ or set CXX"
    fi
}

# The voices of the evaluation of the embedded talker.
ensure_flite() {
    if command -v flite >/dev/null; then return; fi
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        step "installing flite (speech for the evaluation of the embedded talker)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq flite >/dev/null
    else
        fail "no flite found; install it, for example with apt-get install flite"
    fi
}

# The tests of the page use the system's Chromium.
ensure_chromium() {
    local name
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null; then return; fi
    done
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        step "installing chromium (the tests of the page use it)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
    else
        fail "no Chromium found; the tests of the page use it: install chromium"
    fi
}
