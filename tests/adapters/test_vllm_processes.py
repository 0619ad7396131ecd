"""The slow lane: a real vLLM 0.33 server of two nodes, started as users start it, has the plug-in in each process.

No device, and no model with tables: what a table becomes is in test_vllm_stock. The server starts with the compiled
parts of a CPU vLLM 0.32, and does not generate with them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from adapters_env import PYTHON, ROOT, VLLM, WHEELS, environment, install_plugin, make_engines

from deskfleet_engram.host import write_receipt

START_S, END_S = 400, 60
TOKENIZER = ROOT / "tests" / "golden" / "v41-tiny" / "model"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

COUNTERS: dict[str, Any] = {
    "num_lookups": 4,
    "wait_s": 0.25,
    "num_rows": 96,
    "num_unique": 90,
    "num_cache_hits": 30,
    "num_fallback_rows": 0,
    "num_reads": 60,
    "read_bytes": 245760,
    "errors": {"io": 2},
}

pytestmark = [pytest.mark.slow, pytest.mark.adapters]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """The URL, the directory of logs, and that of receipts: two ranks as on two nodes, the second one headless."""
    make_engines()
    place = tmp_path_factory.mktemp("vllm-server")
    site, model, receipts = install_plugin("vllm", place), place / "model", place / "receipts"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model)
    port, master_port = free_port(), free_port()
    told = json.dumps({"deskfleet_engram": {"pack": "/nowhere", "receipts": str(receipts)}})
    flags = (
        "--load-format dummy --max-model-len 256 --max-num-seqs 2 --enforce-eager --tensor-parallel-size 2"
    )
    flags += (
        f" --distributed-executor-backend mp --nnodes 2 --master-addr 127.0.0.1 --master-port {master_port}"
    )
    own_flags = {
        "head": f"--node-rank 0 --host 127.0.0.1 --port {port}",
        "headless": "--node-rank 1 --headless",
    }
    processes = []
    try:
        for node, own in own_flags.items():
            with (place / node).open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [
                            *(str(PYTHON), "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve"),
                            *(str(model), *flags.split(), *own.split(), "--additional-config", told),
                        ],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=environment(
                            *(site, VLLM, WHEELS / "extra"),
                            VLLM_TARGET_DEVICE="cpu",
                            VLLM_CPU_KVCACHE_SPACE="1",
                            VLLM_NO_USAGE_STATS="1",
                            VLLM_HOST_IP="127.0.0.1",
                            GLOO_SOCKET_IFNAME="lo",
                            HF_HUB_OFFLINE="1",
                        ),
                        start_new_session=True,
                    )
                )
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, processes[0], place / "head")
        yield url, place, receipts
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if get(f"{url}/health") is not None:
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM was not ready within {START_S} s:\n{log.read_text()[-3000:]}")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_plugin_is_in_every_kind_of_process(server: tuple[str, Path, Path]) -> None:
    url, logs, _ = server
    assert "0.33.0" in get(f"{url}/version")
    ready = {
        node: re.findall(
            r"\((\w+)(?:-\d+)? pid=(\d+)\).*deskfleet-engram: ready in this process",
            (logs / node).read_text(),
        )
        for node in ("head", "headless")
    }
    assert {name for name, _ in ready["head"]} >= {"EngineCore", "VllmWorker"}, ready
    assert {name for name, _ in ready["headless"]} >= {"VllmWorker"}, ready
    assert len({pid for found in ready.values() for _, pid in found}) >= 3
    # Arguments are parsed before the API server's log is set up: that it has the plug-in shows in its metrics.
    assert "deskfleet_engram_rows_total" in get(f"{url}/metrics")


def test_the_process_that_inspects_models_has_it_too(tmp_path: Path) -> None:
    """It is no process of the server: it is started to look at a model's class, and ends."""
    make_engines()
    site = install_plugin("vllm", tmp_path)
    look = (
        "import json, sys\n"
        "from vllm.model_executor.models.registry import _run_in_subprocess\n"
        "def modules():\n"
        "    import os, sys\n"
        "    return [os.getpid(), 'deskfleet_vllm.seam' in sys.modules]\n"
        "import os\n"
        "print(json.dumps([os.getpid(), 'deskfleet_vllm' in sys.modules, *_run_in_subprocess(modules)]))\n"
    )
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", look],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=environment(site, VLLM, WHEELS / "extra", VLLM_TARGET_DEVICE="cpu", HF_HUB_OFFLINE="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own_pid, is_here, pid, is_there = json.loads(done.stdout.splitlines()[-1])
    assert not is_here  # nobody loaded it where this was asked
    assert pid != own_pid
    assert is_there


def test_what_workers_count_is_in_the_servers_own_metrics(server: tuple[str, Path, Path]) -> None:
    url, _, receipts = server
    for rank in (0, 1):  # as workers write them
        document = {"engine": "vllm", "rank": rank, "world_size": 2, "counters": COUNTERS}
        write_receipt(receipts, f"vllm-rank{rank}-counters.json", document)
    said = get(f"{url}/metrics")
    for line in (
        'deskfleet_engram_rows_total{rank="0"} 96.0',
        'deskfleet_engram_wait_seconds_total{rank="1"} 0.25',
        'deskfleet_engram_errors_total{kind="io",rank="1"} 2.0',
    ):
        assert line in said, said
    assert "vllm:num_requests_running" in said
