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
    compile_modules .venv/base
    touch "$stamp"
}

# compile_modules VENV: on all cores, which pip does not use. A quarter of the modules is never imported, or rarely;
# files for other Python versions fail to compile.
compile_modules() {
    local rare='/(tests?|pip|setuptools|future|networkx)/|/transformers/models/|/pygments/lexers/'
    rare+='|/onnxruntime/(tools|quantization|transformers)/|/torch/(testing|onnx|ao)/'
    "$1/bin/python" -m compileall -qq -j 0 -x "$rare" "$1/lib" || true
}

# The stock clients of the examples, in .venv/clients: their dependencies are many, and none of the server's.
setup_stock_clients() {
    local hash stamp
    hash=$(sha256sum pyproject.toml | cut -c1-16)
    stamp=.venv/clients/.installed-$hash
    [[ -e $stamp ]] && return
    step "installing stock clients into .venv/clients"
    [[ -x .venv/clients/bin/python ]] || "$(find_python)" -m venv .venv/clients
    .venv/clients/bin/python -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras["stock"], sep="\n")' >.venv/clients/requirements.txt
    .venv/clients/bin/python -m pip install -qq --disable-pip-version-check --no-compile -r .venv/clients/requirements.txt
    compile_modules .venv/clients
    touch "$stamp"
}

# A C++ compiler for torch.compile's kernels on a CPU, a browser for the tests of the pages, and flite, whose voices
# evaluate the embedded talker.
ensure_programs() {
    local missing=()
    has_any "${CXX:-}" g++ clang++ || missing+=(g++)
    has_any chromium chromium-browser google-chrome google-chrome-stable || missing+=(chromium)
    has_any flite || missing+=(flite)
    ((${#missing[@]})) || return 0
    if [[ $(id -u) -ne 0 ]] || ! has_any apt-get; then
        fail "programs that tests use: expected a C++ compiler, a browser and flite, got no ${missing[*]}; install what is missing"
    fi
    step "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
}

# has_any NAME...: whether one of these programs is installed.
has_any() {
    local name
    for name; do
        if [[ -n $name ]] && command -v "$name" >/dev/null; then return 0; fi
    done
    return 1
}
