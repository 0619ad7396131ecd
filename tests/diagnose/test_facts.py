"""Boot logs become asked against granted; clamps, replacements and ranks that differ are flagged. About 4 s.

The logs are written here, in the shapes that vLLM 0.33, SGLang 0.5 and the recipes print. The figures are published.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deskfleet.bootfacts.facts import FactSheet
from deskfleet.bootfacts.sheet import read_sheet
from deskfleet.errors import ConfigError

COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
GIB = 2**30

VLLM_ARGS = (
    "(APIServer pid=1) INFO 09-12 10:00:00 [utils.py:253] non-default args: {'model': '/models/v41', "
    "'max_model_len': 500000, 'tensor_parallel_size': 4, 'kv_cache_memory_bytes': 6442450944, 'max_num_seqs': 8, "
    "'moe_backend': 'b12x', 'speculative_config': {'method': 'dspark', 'num_speculative_tokens': 5}, "
    "'compilation_config': {'cudagraph_capture_sizes': [5, 6, 10, 12]}}"
)
VLLM_ENGINE = (
    "(EngineCore pid=9) INFO 09-12 10:00:09 [core.py:109] Initializing a V1 LLM engine (v0.33.0) with config: "
    "model='/models/v41', speculative_config=SpeculativeConfig(method='dspark', model=None, num_spec_tokens={drafts}), "
    "max_seq_len=500000, tensor_parallel_size=4, compilation_config={{'cudagraph_capture_sizes': [5, 6, 10, 12]}}"
)


def vllm_logs(
    *,
    drafts: int = 5,
    kv: tuple[str, ...] = ("6.0",) * 4,
    moe: str | None = "B12X_MXFP4_MXFP8",
    pool: str = "1,888,800",
) -> dict[str, str]:
    """A boot of four nodes, a log each: rank 0's has the engine's own lines."""
    logs = {}
    for rank in range(4):
        lines = [VLLM_ARGS, VLLM_ENGINE.format(drafts=drafts)] if rank == 0 else []
        who = f"(Worker_TP{rank} pid={100 + rank}) INFO 09-12 10:05:{rank:02}"
        lines += [
            f"{who} [gpu_model_runner.py:5150] Model loading took 81.6 GiB memory and 341.215 seconds",
            f"{who} [gpu_worker.py:760] Available KV cache memory: {kv[rank]} GiB",
            f"{who} [gpu_model_runner.py:6582] Graph capturing finished in 34 secs, took 0.58 GiB",
        ]
        if moe is not None:
            lines.append(f"{who} [mxfp4.py:120] Using '{moe}' Mxfp4 MoE backend.")
        logs[f"node-{rank}.log"] = "\n".join(lines)
    logs["node-0.log"] += (
        f"\n(EngineCore pid=9) INFO 09-12 10:09:00 [kv_cache_utils.py:2320] GPU KV cache size: {pool} tokens"
        "\n(APIServer pid=1) INFO:     Application startup complete."
    )
    return logs


def kinds(sheet: FactSheet) -> set[tuple[str, str]]:
    return {(flag.kind, flag.key) for flag in sheet.flags}


def test_a_good_boot_of_four_nodes_has_no_flag() -> None:
    sheet = read_sheet(vllm_logs())
    assert (sheet.engine, sheet.flags) == ("vLLM", ())
    pool, weights, moe = (sheet.row(key) for key in ("kv_tokens", "weight_bytes", "moe_backend"))
    assert pool is not None
    assert weights is not None
    assert moe is not None
    assert pool.granted == {0: 1_888_800}
    assert weights.granted == dict.fromkeys(range(4), int(81.6 * GIB))
    assert (moe.asked, set(moe.granted.values())) == ("b12x", {"B12X_MXFP4_MXFP8"})


def test_a_draft_cut_without_a_word_is_a_clamp() -> None:
    sheet = read_sheet(vllm_logs(drafts=3))
    assert kinds(sheet) == {("clamped", "num_drafts")}
    assert sheet.flags[0].text == "rank 0: tokens drafted ahead: asked 5, granted 3"


def test_a_pool_by_fraction_is_as_small_as_the_smallest_rank() -> None:
    sheet = read_sheet(vllm_logs(kv=("6.7", "4.1", "6.2", "6.6")))
    assert ("ranks differ", "kv_bytes") in kinds(sheet)
    text = next(flag.text for flag in sheet.flags if flag.kind == "ranks differ")
    assert "rank 1 4.10 GiB" in text
    assert text.endswith("the pool of all is as small as 4.10 GiB")
    assert ("clamped", "kv_bytes") in kinds(sheet)  # asked 6 GiB


@pytest.mark.parametrize(
    ("moe", "flag"), [("TRITON", ("replaced", "moe_backend")), (None, ("missing", "moe_backend"))]
)
def test_another_kernel_than_asked_for_and_no_word_of_one(moe: str | None, flag: tuple[str, str]) -> None:
    assert kinds(read_sheet(vllm_logs(moe=moe))) == {flag}


def test_one_rank_with_another_kernel() -> None:
    logs = vllm_logs()
    logs["node-2.log"] = logs["node-2.log"].replace("B12X_MXFP4_MXFP8", "MARLIN")
    found = kinds(read_sheet(logs))
    assert found == {("replaced", "moe_backend"), ("ranks differ", "moe_backend")}


SGLANG = """\
[2026-09-24 10:00:00] server_args=ServerArgs(model_path='/m', tp_size=4, max_total_tokens=8000000, \
mem_fraction_static=0.8, max_running_requests=16, chunked_prefill_size=4096, context_length=1048576, \
speculative_algorithm='DSPARK', moe_runner_backend='auto')
[2026-09-24 10:02:40 TP{rank}] Load weight end. elapsed=120.2 s, type=DeepseekV41ForCausalLM, avail mem=46.40 GB, \
mem usage=70.76 GB.
{clamp}[2026-09-24 10:02:44 TP{rank}] DSV4 memory calculation: bytes_per_full_token=1670.75, available_bytes=17.10 GB, \
full_token={tokens}
[2026-09-24 10:02:50 TP{rank}] Capture cuda graph bs [1, 2, 4, 8, 16]
[2026-09-24 10:03:20 TP{rank}] Capture cuda graph end. Time elapsed: 30.2 s. mem usage=1.32 GB. avail mem=24.00 GB.
[2026-09-24 10:03:21 TP{rank}] max_total_num_tokens={tokens}, chunked_prefill_size=4096, max_prefill_tokens=16384, \
max_running_requests=16, context_len=1048576, available_gpu_mem=24.31 GB
[2026-09-24 10:03:30] The server is fired up and ready to roll!
"""


def sglang_logs(*tokens: int, clamp: str = "") -> dict[str, str]:
    return {f"log-{r}": SGLANG.format(rank=r, tokens=count, clamp=clamp) for r, count in enumerate(tokens)}


def test_a_pin_that_was_silently_clamped_is_found_on_every_rank() -> None:
    sheet = read_sheet(sglang_logs(7_412_480, 7_412_480, 7_412_480, 7_412_480))
    assert kinds(sheet) == {("clamped", "kv_tokens")}
    assert [flag.text for flag in sheet.flags] == [
        f"rank {rank}: tokens in the KV pool: asked 8,000,000, granted 7,412,480" for rank in range(4)
    ]


def test_pages_are_no_clamp_and_what_the_engine_warned_of_is_told() -> None:
    assert read_sheet(sglang_logs(*[7_999_744] * 4)).flags == ()
    warned = "[2026-09-24 10:02:44 TP0] max_total_tokens=8000000 is larger than the profiled value 326144. Use it.\n"
    sheet = read_sheet(sglang_logs(326_144, clamp=warned))
    assert kinds(sheet) == {("clamped", "kv_tokens"), ("warned", "")}
    assert "rank 0: max_total_tokens=8000000 is larger than the profiled value 326144" in [
        f.text for f in sheet.flags
    ]


def test_a_rank_with_another_pool_is_found_whatever_was_asked() -> None:
    sheet = read_sheet(sglang_logs(8_000_000, 7_999_000))
    assert kinds(sheet) == {("ranks differ", "kv_tokens")}


def test_two_ranks_that_read_the_same_rows() -> None:
    """Fluent and wrong: ranks 1 to 3 once read rank 0's rows."""
    logs = vllm_logs()
    for rank in range(4):
        rows = [
            (0, 96_000_564),
            (96_000_564, 192_001_740),
            (96_000_564, 192_001_740),
            (288_002_916, 384_006_168),
        ][rank]
        logs[f"node-{rank}.log"] += (
            f"\n(Worker_TP{rank} pid=1) Engram DISK mode: layer 1 rows [{rows[0]}, {rows[1]})"
        )
    sheet = read_sheet(logs)
    assert kinds(sheet) == {("ranks differ", "engram_rows")}
    assert "two ranks read the same rows" in sheet.flags[0].text


NATIVE = """\
rank 0: 22.91 MiB of weights in 2.0 s, 20.99 MiB of caches, pid 14488
rank 1: 22.91 MiB of weights in 2.1 s, {caches} MiB of caches, pid 14489
rank       planned    measured             weights      caches     process
rank 0  499.72 MiB  500.96 MiB   +0.2%  208.91 MiB   21.06 MiB  270.99 MiB
rank 1  480.00 MiB  {measured} MiB   +0.2%  208.91 MiB   21.06 MiB  270.99 MiB
pocket answers at http://127.0.0.1:8000/v1 (16,384 tokens). Ctrl-C stops it.
"""


def test_our_own_engine() -> None:
    good = read_sheet({"serve.log": NATIVE.format(caches="20.99", measured="480.96")})
    assert (good.engine, good.flags) == ("native", ())
    row = good.row("max_model_len")
    assert row is not None
    assert row.granted == {None: 16_384}
    bad = read_sheet({"serve.log": NATIVE.format(caches="10.00", measured="600.00")})
    assert kinds(bad) == {("ranks differ", "kv_bytes"), ("clamped", "process_bytes")}
    assert "rank 1: resident memory of the rank: planned 480.00 MiB, measured 600.00 MiB" in [
        f.text for f in bad.flags
    ]


def test_what_is_no_boot_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="no boot logs"):
        read_sheet({"x.log": "hello\nworld\n"})


def test_the_command(tmp_path: Path) -> None:
    paths = []
    for name, text in vllm_logs(drafts=3).items():
        (tmp_path / name).write_text(text)
        paths.append(str(tmp_path / name))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "facts", *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    done = run(*paths)
    assert done.returncode == 1, done.stderr
    assert "clamped: rank 0: tokens drafted ahead: asked 5, granted 3" in done.stdout
    assert "weights on the device" in done.stdout
    found = json.loads(run(*paths, "--json").stdout)
    assert {
        "kind": "clamped",
        "key": "num_drafts",
        "text": "rank 0: tokens drafted ahead: asked 5, granted 3",
    } in found["flags"]
    assert run(str(tmp_path / "none.log")).returncode == 2
