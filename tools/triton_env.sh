#!/usr/bin/env bash
# Makes a virtual environment with Triton beside the CPU build of torch: its interpreter runs the GPU kernels' tests, and
# its compiler makes and disassembles them for sm_90, both without a GPU.
#
#     tools/triton_env.sh DIRECTORY        (make test-kernels: var/triton)
#     PYTHONPATH=src:packages/deskfleet-engram/src:. DIRECTORY/bin/python -m pytest tests/gpu -m triton
#     PYTHONPATH=src DIRECTORY/bin/python tools/triton_sass.py
#
# Its own environment, because the CPU build of torch asks for no Triton, and the interpreter of 3.6 (the version that
# torch 2.11 for CUDA 13 brings) cannot take a number out of an array as numpy 2.4 wants it. About 1 GB and a minute.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
version=3.6.0
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if command -v flock >/dev/null; then
    flock 9
fi
installed() {
    "$venv/bin/python" -c 'import importlib.metadata as m, tokenizers; print(m.version("triton"))' 2>/dev/null
}
if [ "$(installed)" = "$version" ]; then
    exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$venv"
install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}
# torch comes first and alone, as in tools/setup.sh.
install -r requirements/torch-cpu.txt
# Triton last: it says that the environment is complete.
install "numpy==2.3.5" "msgspec>=0.19" "tokenizers" "safetensors" "pytest>=8.3" "pytest-asyncio"
install "triton==$version"
