"""Lines of engines' logs as facts: a table of patterns for each engine. Owns the patterns and whose rank a line is of.

The shapes are those of vLLM 0.32 and 0.33 (its source), SGLang 0.5 (its source, and the recipes' boot logs) and our own
engine. A line that no pattern knows says nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deskfleet.bootfacts.facts import Fact, Note, Side, Value
from deskfleet.errors import ConfigError
from deskfleet.units import parse_bytes

GIB = 2**30

_RANK_IN_LINE = re.compile(
    r"Worker(?:_DP\d+)?_TP(\d+)|\bTP(\d+)(?:_EP\d+)?[ \]]|rank[ =](\d+)\b|\(Worker[^)]*rank=(\d+)",
    re.IGNORECASE,
)
_RANK_IN_NAME = re.compile(r"(?:rank|tp|worker|node)[-_]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Where a line holds `regex`, its groups by `read` are a value of `key`."""

    key: str
    side: Side
    regex: re.Pattern[str]
    read: Callable[[re.Match[str]], Value]


def _pattern(key: str, side: Side, regex: str, read: Callable[[re.Match[str]], Value]) -> Pattern:
    return Pattern(key, side, re.compile(regex), read)


def _int(match: re.Match[str]) -> int:
    return int(match[1].replace(",", ""))


def _gib(match: re.Match[str]) -> int:
    """Of what SGLang calls GB and vLLM GiB: both are 2**30."""
    return int(float(match[1]) * GIB)


def _text(match: re.Match[str]) -> str:
    return match[1]


def _seconds(match: re.Match[str]) -> float:
    return float(match[1])


def _sizes(match: re.Match[str]) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in re.findall(r"\d+", match[1])}))


def _own_bytes(match: re.Match[str]) -> int:
    return parse_bytes(match[1])


VLLM = (
    _pattern("kv_tokens", "granted", r"[CG]PU KV cache size: ([\d,]+) tokens", _int),
    _pattern("kv_bytes", "granted", r"Available KV cache memory: ([\d.]+) GiB", _gib),
    _pattern("weight_bytes", "granted", r"Model loading took ([\d.]+) Gi?B", _gib),
    _pattern("load_s", "granted", r"Model loading took [\d.]+ Gi?B(?: memory)? and ([\d.]+) seconds", _seconds),
    _pattern("graph_bytes", "granted", r"Graph capturing finished in [\d.]+ secs, took ([\d.]+) GiB", _gib),
    _pattern("moe_backend", "granted", r"Using '?([\w.]+)'? (?:\w+ )?MoE backend", _text),
    _pattern("attention_backend", "granted", r"Using (?:\w+Enum\.)?'?(\w+)'? (?:attention )?backend", _text),
    _pattern("linear_backend", "granted", r"(?:Selected|Using) '?(\w+)'? (?:kernel )?for (?:\w+)?Linear", _text),
    _pattern("max_model_len", "granted", r"\bmax_seq_len=(\d+)", _int),
    _pattern("tp_size", "granted", r"\btensor_parallel_size=(\d+)", _int),
    _pattern("speculation", "granted", r"SpeculativeConfig\(method='?(\w+)", _text),
    _pattern("num_drafts", "granted", r"SpeculativeConfig\(.*?num_spec(?:ulative)?_tokens=(\d+)", _int),
    _pattern("kv_cache_dtype", "granted", r"Using (\w+) data type to store kv cache", _text),
    _pattern("graph_sizes", "granted", r"'cudagraph_capture_sizes': \[([\d, ]*)\]", _sizes),
    _pattern("engram_rows", "granted", r"Engram DISK mode: (layer \d+ rows \[\d+, ?\d+\))", _text),
)  # fmt: skip

SGLANG = (
    _pattern("kv_tokens", "granted", r"\bfull_token=(\d+)", _int),
    _pattern("kv_tokens", "granted", r"\bmax_total_num_tokens=(\d+)", _int),
    _pattern("kv_tokens", "granted", r"KV Cache is allocated\. #tokens: (\d+)", _int),
    _pattern("weight_bytes", "granted", r"Load weight end\..*mem usage=([\d.]+) GB", _gib),
    _pattern("load_s", "granted", r"Load weight end\. elapsed=([\d.]+) s", _seconds),
    _pattern("available_bytes", "granted", r"\bavailable_gpu_mem=([\d.]+) GB", _gib),
    _pattern("graph_bytes", "granted", r"Capture cuda graph end\..*mem usage=([\d.]+) GB", _gib),
    _pattern("graph_sizes", "granted", r"Capture cuda graph bs \[([\d, ]*)\]", _sizes),
    _pattern("max_num_seqs", "granted", r"\bmax_total_num_tokens=.*\bmax_running_requests=(\d+)", _int),
    _pattern(
        "max_num_batched_tokens", "granted", r"\bmax_total_num_tokens=.*\bchunked_prefill_size=(\d+)", _int
    ),
    _pattern("max_model_len", "granted", r"\bmax_total_num_tokens=.*\bcontext_len=(\d+)", _int),
    _pattern("moe_backend", "granted", r"MoE (?:runner )?backend(?: is)?[:=] ?'?(\w+)", _text),
    _pattern("attention_backend", "granted", r"[Aa]ttention backend(?: is)?[:=] ?'?(\w+)", _text),
    _pattern("engram_rows", "granted", r"(packed=\S*engram-l\d+-r\d+of\d+\S*)", _text),
)

NATIVE = (
    _pattern("weight_bytes", "granted", r"^rank \d+: ([\d.]+ [KMGT]?i?B) of weights in", _own_bytes),
    _pattern("load_s", "granted", r"^rank \d+: .* of weights in ([\d.]+) s", _seconds),
    _pattern("kv_bytes", "granted", r"^rank \d+: .*, ([\d.]+ [KMGT]?i?B) of caches", _own_bytes),
    _pattern(
        "process_bytes",
        "asked",
        r"^rank \d+ +([\d.]+ [KMGT]?i?B) +[\d.]+ [KMGT]?i?B +[+-][\d.]+%",
        _own_bytes,
    ),
    _pattern(
        "process_bytes",
        "granted",
        r"^rank \d+ +[\d.]+ [KMGT]?i?B +([\d.]+ [KMGT]?i?B) +[+-][\d.]+%",
        _own_bytes,
    ),
    _pattern("max_model_len", "granted", r"answers at \S+ \(([\d,]+) tokens\)", _int),
)

_SGLANG_ARGS = {
    "max_total_tokens": "kv_tokens",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "tp_size": "tp_size",
    "speculative_algorithm": "speculation",
    "speculative_dspark_block_size": "num_drafts",
    "moe_runner_backend": "moe_backend",
    "attention_backend": "attention_backend",
    "kv_cache_dtype": "kv_cache_dtype",
}
_VLLM_ARGS = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "tensor_parallel_size": "tp_size",
    "kv_cache_memory_bytes": "kv_bytes",
    "kv_cache_dtype": "kv_cache_dtype",
    "moe_backend": "moe_backend",
    "linear_backend": "linear_backend",
    "attention_backend": "attention_backend",
}
_UNSAID = frozenset({"auto", "None", ""})

_NOTES = (
    re.compile(r"(max_total_tokens=\S+ is larger than the profiled value [-\d]+)"),
    re.compile(r"(Unknown vLLM environment variable detected: \w+)"),
    re.compile(
        r"((?:CUDA graph is disabled|Cudagraph is disabled|enforce_eager=True|cuda graphs? disabled)\S*)",
        re.IGNORECASE,
    ),
    re.compile(r"(.*(?:[Ff]alling back to|[Ff]allback to) .*)"),
    re.compile(r"(.*(?:Emulation\w* (?:MoE|linear) backend|dequantiz\w+ on the fly).*)"),
    re.compile(r"(.*(?:Decreasing|Reducing|Clamp\w+|Truncat\w+) max_\w+ .*)"),
)

ENGINES: dict[str, tuple[Pattern, ...]] = {"vLLM": VLLM, "SGLang": SGLANG, "native": NATIVE}
_MARKS = {
    "vLLM": re.compile(
        r"\bvllm\b|EngineCore|[CG]PU KV cache size|\bV1 LLM engine|Worker_TP\d", re.IGNORECASE
    ),
    "SGLang": re.compile(
        r"\bsglang\b|server_args=|max_total_num_tokens=|full_token=|Load weight (?:begin|end)"
    ),
    "native": re.compile(r"^rank \d+: .* of weights in|deskfleet|^rank +planned +measured"),
}


def engine_of(text: str) -> str:
    """Return whose log it is. Raises ConfigError when it is none known here."""
    found = {name: len(mark.findall(text)) for name, mark in _MARKS.items()}
    found["native"] += sum(bool(_MARKS["native"].search(line)) for line in text.splitlines())
    name = max(found, key=found.__getitem__)
    if not found[name]:
        raise ConfigError(
            "these are no boot logs of vLLM, SGLang or deskfleet",
            hint="name logs from before the port opened",
        )
    return name


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file's name tells: rank-1, tp2, worker3; None where it tells none."""
    found = _RANK_IN_NAME.search(name)
    return None if found is None else int(found[1])


def read_lines(engine: str, text: str, *, rank: int | None) -> Iterator[Fact | Note]:
    """Yield what a log says. `rank` is whose it is where a line does not tell."""
    for line in text.splitlines():
        told = _RANK_IN_LINE.search(line)
        own = next((int(group) for group in told.groups() if group is not None), rank) if told else rank
        for pattern in ENGINES[engine]:
            found = pattern.regex.search(line)
            if found is not None:
                yield Fact(pattern.key, pattern.side, pattern.read(found), own, line.strip())
        yield from _asked(engine, line, own)
        for note in _NOTES:
            said = note.search(line)
            if said is not None:
                yield Note(_without_prefix(said[1]), own, line.strip())
                break


def _asked(engine: str, line: str, rank: int | None) -> Iterator[Fact]:
    """What was given on the command line, as the engine repeats it."""
    if engine == "vLLM":
        start = line.find("non-default args: {")
        if start >= 0:
            yield from _facts(_dictionary(line[start + len("non-default args: ") :]), _VLLM_ARGS, line, rank)
    elif engine == "SGLang":
        start = line.find("server_args=ServerArgs(")
        if start >= 0:
            pairs = re.findall(
                r"(\w+)=('(?:[^'\\]|\\.)*'|\[[^\]]*\]|[^,()]+)",
                line[start + len("server_args=ServerArgs(") :],
            )
            yield from _facts({name: value.strip("'") for name, value in pairs}, _SGLANG_ARGS, line, rank)


def _facts(given: dict[str, object], names: dict[str, str], line: str, rank: int | None) -> Iterator[Fact]:
    for name, key in names.items():
        value = given.get(name)
        if value is not None and str(value) not in _UNSAID:
            text = str(value)
            yield Fact(key, "asked", int(text) if text.lstrip("-").isdigit() else text, rank, line.strip())
    speculative = given.get("speculative_config")
    if isinstance(speculative, dict):
        if "method" in speculative:
            yield Fact("speculation", "asked", str(speculative["method"]), rank, line.strip())
        if "num_speculative_tokens" in speculative:
            yield Fact("num_drafts", "asked", int(speculative["num_speculative_tokens"]), rank, line.strip())
    compilation = given.get("compilation_config")
    if isinstance(compilation, dict) and isinstance(compilation.get("cudagraph_capture_sizes"), list):
        yield Fact(
            "graph_sizes", "asked", tuple(sorted(compilation["cudagraph_capture_sizes"])), rank, line.strip()
        )


def _dictionary(text: str) -> dict[str, object]:
    """Read a Python dictionary as printed. Where objects stand in it that cannot be read, its plain entries."""
    try:
        found = ast.literal_eval(text.strip())
        return found if isinstance(found, dict) else {}
    except (ValueError, SyntaxError):
        pairs = re.findall(r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?[\d.]+|True|False|\{[^{}]*\})", text)
        plain: dict[str, object] = {}
        for name, value in pairs:
            try:
                plain[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                continue
        return plain


def _without_prefix(text: str) -> str:
    """Return a message without the process, level, time and file before it."""
    return re.sub(
        r"^(?:\([^)]*\) *)?(?:(?:INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] *|\[[^\]]*\] *)?", "", text
    ).strip()


__all__ = ["ENGINES", "GIB", "engine_of", "rank_in_name", "read_lines"]
