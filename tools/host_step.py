"""What the host does for a step of a GPU that decodes, without a GPU: microseconds a step, the device's share left out.

    python tools/host_step.py [--requests 1,16,64] [--steps 300]     # in the environment of tools/triton_env.sh

Pocket's engine core with requests that never end, half of them greedy, half sampled; everything runs as on a GPU but
the launches, and tokens come out of thin air. Engram rows are read from the checkpoint's files. What is measured is how
long a GPU would wait between two steps, but for copies and launches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.backends import DeviceOptions
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.distributed import Communicator
from deskfleet.engine.messages import AddRequest
from deskfleet.engine.rank import token_map
from deskfleet.engine.runner import ModelRunner
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.embedded import POCKET, locate
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import resolve_limits

PROMPT, WARM_UP = 40, 40


def core_of(num_requests: int) -> EngineCore:
    """Pocket with everything but launches."""
    source = Checkpoint.open(locate(POCKET))
    tokens, config = token_map(source), source.config
    limits = resolve_limits(
        config, max_num_seqs=num_requests, max_model_len=2048, block_size=16, kv_cache_tokens=None,
        num_window_tails=8, with_drafts=False,
    )  # fmt: skip
    most = max(num_requests * PROMPT, 64)
    runner = ModelRunner(
        source, ShardPlan(config, Layout(1)), Communicator(), limits,
        pad_compressed_id=int(tokens[config.engram_pad_token_id]),
        device="interpreter", device_options=DeviceOptions(max_step_tokens=most),
    )  # fmt: skip
    model, steps, random = runner.backend.model, {}, np.random.default_rng(0)

    def run_piece(rows, start, stop, size, *, long, to_decoder=False):
        if (size, long) not in steps:
            steps[size, long], _ = model._make_step(size, long, model.device)
        model._fill(steps[size, long], rows, start, stop)
        return steps[size, long]

    def taken(step, places, numbers, wanted):
        known = int((numbers < wanted.num_known).sum())
        chosen = random.integers(100, config.vocab_size // 2, len(numbers) - known)
        return model._logits[:known], np.stack([chosen, np.zeros(len(chosen), np.int64)], 1)

    model._run_piece, model._taken, model._run_head = run_piece, taken, lambda step, rows: None
    core = EngineCore(runner, tokens, CoreOptions(max_num_batched_tokens=most))
    for number in range(num_requests):
        prompt = tuple(int(token) for token in random.integers(100, config.vocab_size // 2, PROMPT))
        sampling = SamplingParams(temperature=number % 2 * 0.7, max_tokens=1900, ignore_eos=True)
        core.add(AddRequest(str(number), prompt, bytes(PROMPT), (), sampling))
    return core


def main() -> int:
    """Print the median step and the tenth quickest and slowest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for count in map(int, options.requests.split(",")):
        core, times = core_of(count), []
        for number in range(WARM_UP + options.steps):
            begin = time.perf_counter()
            core.step()
            if number >= WARM_UP:
                times.append(1e6 * (time.perf_counter() - begin))
        tenths = statistics.quantiles(times, n=10)
        print(
            f"{count} requests: {statistics.median(times):.0f} us a step, {tenths[0]:.0f} to {tenths[-1]:.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
