#!/usr/bin/env bash
# Makes a virtual environment with LiteLLM, for the slow test of it as a client and for the benchmark beside its proxy.
#
#     tools/litellm_env.sh DIRECTORY        (var/litellm is where both look)
#
# Its own environment, because LiteLLM's pins are not ours. About 600 MB and two minutes, once. Two of these take turns.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
version=1.106.12
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if command -v flock >/dev/null; then
    flock 9
fi
installed() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("litellm"))' 2>/dev/null
}
if [ "$(installed)" = "$version" ]; then
    exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "litellm[proxy]==$version"
