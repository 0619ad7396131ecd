"""What makes a server slow: rungs over its queue, its kernels and its machine. Owns their rules."""

from __future__ import annotations

import re

from deskfleet.diagnose.finding import Finding, clear, found, logs_of, unknown, url_of
from deskfleet.diagnose.situation import Situation
from deskfleet.units import format_bytes

GIB = 2**30
_WAITING = ("deskfleet_engine_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_PREEMPTED = ("deskfleet_engine_preempted_total", "vllm:num_preemptions_total")
_KV_USE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
_COMPILES = re.compile(
    r"(ninja: |\[AutoTuner\]|Autotuning process starts|nvcc |Compiling kernel|Start compiling)", re.I
)
_READY = ("Application startup complete", "The server is fired up", "answers at http")
_EAGER = re.compile(r"enforce_eager=True|[Cc]u?da ?graphs? (?:is |are )?disabled")


def queue(s: Situation) -> Finding:
    name = "queue"
    waiting, preempted = s.meters.value(*_WAITING), s.meters.growth(*_PREEMPTED)
    use = s.meters.value(*_KV_USE)
    if preempted:
        return found(
            name,
            f"{preempted:.0f} requests gave their memory to others in {s.meters.over_s:.0f} s: the pool is too small",
            "deskfleet plan CHECKPOINT --nodes N   # a larger pool, or fewer requests at the same time",
        )
    if waiting:
        full = "" if use is None else f", and {use:.0%} of the KV pool is taken"
        return found(
            name,
            f"{waiting:.0f} requests wait{full}",
            f"deskfleet bench serve {url_of(s)} --parts mixed   # when nobody else asks",
        )
    if waiting is None:
        return unknown(name, "the server does not tell of its queue", f"curl {url_of(s)}/metrics")
    return clear(name, "nobody waits")


def compiling(s: Situation) -> Finding:
    name = "compiling"
    if not s.logs:
        return unknown(name, "no logs were given", "deskfleet diagnose URL --logs FILE...")
    for _, text in s.logs:
        ready = max((text.find(mark) for mark in _READY), default=-1)
        hit = _COMPILES.search(text, ready) if ready >= 0 else None
        if hit:
            return found(
                name,
                f"kernels are compiled or tuned after the server was ready: {hit[1].strip()}",
                "deskfleet bench serve URL --quick   # once more, warm; and keep the caches of every node",
            )
    return clear(name, "nothing is compiled after the server was ready")


def eager(s: Situation) -> Finding:
    name = "graphs"
    if not s.logs:
        return unknown(name, "no logs were given", "deskfleet facts LOG...")
    hit = _EAGER.search(logs_of(s))
    if hit:
        return found(
            name, f"no graphs are used ({hit[0]}): some 200 ms a step instead of 60", "deskfleet facts LOG..."
        )
    return clear(name, "no log says that graphs are off")


def host_load(s: Situation) -> Finding:
    name = "host"
    host = s.host
    if not host.is_server:
        return unknown(
            name, "the server is on another machine", "deskfleet diagnose URL   # on the head node"
        )
    if host.swap_used_bytes and host.swap_used_bytes > GIB:
        return found(
            name,
            f"{format_bytes(host.swap_used_bytes)} are swapped out",
            "swapoff -a   # and see what then does not fit",
        )
    if host.memory_pressure is not None and host.memory_pressure > 0.1:
        return found(
            name,
            f"{host.memory_pressure:.0%} of the last minute somebody waited for memory",
            "deskfleet diagnose URL --kernel-log FILE",
        )
    if host.load is not None and host.num_cores and host.load > 1.5 * host.num_cores:
        return found(
            name,
            f"load {host.load:.1f} on {host.num_cores} cores: others take the CPU",
            "top   # spare containers cost 5 to 8 %",
        )
    return clear(name, "the machine is not busy with other things")


def speed(s: Situation) -> Finding:
    """What is left when nothing above explains it: measure."""
    name = "speed"
    if s.question is None or s.question.tok_s is None:
        return unknown(name, "no rate is known", f"deskfleet bench serve {url_of(s)} --quick")
    return Finding(
        name,
        "unknown",
        f"one stream at {s.question.tok_s:,.1f} tok/s; nothing above explains a slow server",
        f"deskfleet bench serve {url_of(s)} --quick   # then deskfleet bench published RESULT, deskfleet profile TRACE",
    )


__all__ = ["compiling", "eager", "host_load", "queue", "speed"]
