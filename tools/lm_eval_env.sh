#!/usr/bin/env bash
# Makes a virtual environment with lm-evaluation-harness, for the slow test of the gate that reads its results.
#
#     tools/lm_eval_env.sh DIRECTORY        (var/lm-eval is where the test looks)
#
# Its own environment, because its pins are not ours. It asks a server, so it gets no torch. About 700 MB and two minutes,
# once. Two of these take turns.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
version=0.4.13
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if command -v flock >/dev/null; then
    flock 9
fi
installed() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("lm-eval"))' 2>/dev/null
}
if [ "$(installed)" = "$version" ]; then
    exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "lm-eval[api]==$version"
