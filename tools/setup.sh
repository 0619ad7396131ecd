#!/usr/bin/env bash
# Makes .venv with everything installed, unless it is there and no older than what it is made from.
#
#     tools/setup.sh STAMP INPUT...
#
# Two of these at once take turns. The stamp is written last, so an interrupted run is repeated.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=$1
shift
venv=.venv

is_current() {
    [ -e "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null || return 1
    local input
    for input in "$@"; do
        [ "$input" -nt "$stamp" ] && return 1
    done
    return 0
}

# CPython 3.11 first: the one that this repository's CI runs.
find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return 0
        fi
    done
    echo "setup: no Python of 3.11 or later with venv and ensurepip was found" >&2
    echo "setup: install one (on Debian: python3 and python3-venv), or name it: make setup PYTHON=..." >&2
    return 1
}

# -qq: errors only. pip warns about places of the machine's own configuration that hold nothing.
install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

mkdir -p var
exec 9>var/.setup.lock
if command -v flock >/dev/null; then
    flock 9
fi
if is_current "$@"; then
    exit 0
fi

if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv"
fi
# torch comes first and alone: an index that has a CPU build must be asked for exactly this one.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "setup: installing torch (a few hundred MB, once)" >&2
    install -r requirements/torch-cpu.txt
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "setup: no C++ compiler was found, and the row reader and the operators are built from source" >&2
    echo "setup: install one (on Debian: g++), or name it: make setup CXX=..." >&2
    exit 1
fi
echo "setup: installing deskfleet and its tools" >&2
torch=$("$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))')
install --constraint requirements/checks.txt --constraint <(echo "$torch") \
    -e packages/deskfleet-engram -e packages/deskfleet-ops -e '.[engine,dev]'
touch "$stamp"
