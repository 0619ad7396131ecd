"""The processes of a gateway measurement: upstream, gateways, load generator, each alone, so that each one's CPU is its
own.

Owns their start and end, LiteLLM's configuration, and where its program is looked for. Measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from deskfleet.bench.gateway.generator import Job, Outcome
from deskfleet.bench.gateway.upstream import MODEL
from deskfleet.errors import ConfigError, EngineError

LITELLM_VENV = Path("var/litellm")
LITELLM_INSTALL = (
    f"python3 -m venv {LITELLM_VENV} && {LITELLM_VENV}/bin/pip install 'litellm[proxy]==1.106.12'"
)
"""In a virtual environment of its own: its pins are not ours."""

_STOP_S = 15.0
_LITELLM_START_S = 90.0


@dataclass(frozen=True, slots=True)
class Served:
    """A process that listens at `url`."""

    url: str
    pid: int
    key: str = "none"

    def cpu_s(self) -> float:
        """CPU seconds so far, of the process and what it started; the system counts in hundredths."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return sum(_cpu_s(process) for process in (own, *own.children(recursive=True)))
        return 0.0

    def set_step(self, step_s: float) -> None:
        """Set the pace of an upstream, or of a gateway with the engine inside."""
        data = json.dumps({"step_s": step_s}).encode()
        request = urllib.request.Request(f"{self.url}/step", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10):
            pass


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextmanager
def starting(command: Sequence[str]) -> Iterator[Callable[[], Served]]:
    """Run `command`, which prints a JSON object with `url` once it listens, until the block is left.

    What is yielded waits for that, and raises EngineError when the process ends before.
    """
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait() -> Served:
        line = process.stdout.readline() if process.stdout else ""
        try:
            url = json.loads(line)["url"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{' '.join(command)} did not say where it listens: {line!r}") from error
        return Served(url, process.pid)

    try:
        yield wait
    finally:
        _end(process)


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this package."""
    return (sys.executable, "-m", f"deskfleet.bench.gateway.{name}", *arguments)


class Generator:
    """The load generator's process: one job at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: Job) -> Outcome:
        """Run a job to its end. Raises EngineError when the process ends instead."""
        if self._process.stdin is None or self._process.stdout is None:
            raise EngineError("the load generator has no pipes")
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineError("the load generator ended; its error stands above")
        return msgspec.json.decode(line, type=Outcome)


@contextmanager
def generating() -> Iterator[Generator]:
    """Run the load generator until the block is left."""
    process = subprocess.Popen(module("generator"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Generator(process)
    finally:
        _end(process)


def find_litellm(named: Path | None) -> Path | None:
    """Return LiteLLM's program: the one named, the one of its own virtual environment, or one on PATH.

    None where there is none. Raises ConfigError when the one named is not there.
    """
    if named is not None:
        if not os.access(named, os.X_OK):
            raise ConfigError(f"{named} is no program", hint=LITELLM_INSTALL)
        return named
    own = LITELLM_VENV / "bin" / "litellm"
    if os.access(own, os.X_OK):
        return own
    found = shutil.which("litellm")
    return None if found is None else Path(found)


@contextmanager
def starting_litellm(program: Path, upstream_url: str) -> Iterator[Callable[[], Served]]:
    """Run LiteLLM's proxy with one worker in front of the upstream until the block is left.

    What is yielded waits until it answers, and raises EngineError when it does not come up.
    """
    port = _free_port()
    with TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        key = f"sk-{secrets.token_hex(24)}"
        config.write_text(_litellm_config(upstream_url, key), encoding="utf-8")
        log = (Path(directory) / "log").open("w+")
        argv = [
            str(program),
            "--config",
            str(config),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--num_workers",
            "1",
        ]
        environment = os.environ | {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=environment
        )

        def wait() -> Served:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process, Path(log.name))
            return Served(url, process.pid, key)

        try:
            yield wait
        finally:
            _end(process)
            log.close()


def litellm_version(program: Path) -> str:
    """Return the version of the package it came with, else what it says itself, which takes it seconds; maybe empty."""
    packages = map(str, program.resolve().parent.parent.glob("lib/python*/site-packages"))
    for found in distributions(name="litellm", path=list(packages)):
        return found.version
    try:
        done = subprocess.run((program, "--version"), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    words = [word for word in done.stdout.split() if word[:1].isdigit()]
    return words[-1] if words else ""


def _litellm_config(upstream_url: str, key: str) -> str:
    return (
        "model_list:\n"
        f"  - model_name: {MODEL}\n"
        "    litellm_params:\n"
        f"      model: openai/{MODEL}\n"
        f"      api_base: {upstream_url}/v1\n"
        "      api_key: none\n"
        "litellm_settings:\n"
        "  telemetry: false\n"
        "  num_retries: 0\n"
        "general_settings:\n"
        f"  master_key: {key}\n"
    )


def _wait_for(url: str, process: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + _LITELLM_START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise EngineError(f"LiteLLM did not come up: {' '.join(last) or 'no word of it'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


__all__ = [
    "LITELLM_INSTALL",
    "LITELLM_VENV",
    "Generator",
    "Served",
    "find_litellm",
    "generating",
    "litellm_version",
    "module",
    "starting",
    "starting_litellm",
]
