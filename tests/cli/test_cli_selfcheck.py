"""`deskfleet selfcheck`: that a sound engine passes every check, that each check sees what it is there for, and the verb.

The engine of most tests is the real one without processes, so that a mistake can be planted in it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
import torch
from cli_process import CHECKPOINT, Done, deskfleet

from deskfleet import selfcheck
from deskfleet.endpoint import EngineStats, GenerateRequest, SamplingParams, TokenChunk
from deskfleet.engine import speculate
from deskfleet.engine.blocks import CacheManager
from deskfleet.engine.client import EngineClient, EngineOptions, LoadedRank
from deskfleet.engine.core import CoreOptions, EngineCore
from deskfleet.engine.limits import resolve_limits
from deskfleet.engine.messages import AddRequest, RequestOutput
from deskfleet.engine.request import Request
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import SpeculationOptions, Verdict
from deskfleet.errors import ConfigError, EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.config import ModelConfig
from deskfleet.selfcheck import (
    BATCH,
    CHUNKED,
    DCP_2,
    LIMITS,
    PREEMPTED,
    REPEAT,
    SPECULATION_BLOCK,
    SPECULATION_TOKEN,
    STEPWISE,
    TP_2,
    TP_3,
    WARM,
    WARM_EXACT,
    WARM_WINDOW,
    Check,
    SelfCheck,
    self_check,
)
from tests.engine.golden import measured, token_map
from tests.engine.lockstep import Lockstep

Fault = Callable[["LocalEngine"], None]


class LocalEngine:
    """An engine of the real parts in this process, ranks in threads. `fault` is called when it is ready."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, fault: Fault = lambda engine: None) -> None:
        config = checkpoint.config
        speculation = SpeculationOptions.parse(options.speculation, config.dspark_block_size)
        assert options.max_model_len is not None
        self.options = options
        self.group = Lockstep(
            checkpoint,
            options.tp_size,
            resolve_limits(
                config,
                max_num_seqs=options.max_num_seqs,
                max_model_len=options.max_model_len,
                block_size=options.block_size,
                kv_cache_tokens=options.kv_cache_tokens,
                num_window_tails=options.num_window_tails,
                with_drafts=speculation.num_drafts > 0,
                tp_size=options.tp_size,
                dcp_size=options.dcp_size,
            ),
            pad_compressed_id=int(token_map()[config.engram_pad_token_id]),
            with_drafts=speculation.num_drafts > 0,
        )
        self.core = EngineCore(
            self.group.leader,
            token_map(),
            CoreOptions(
                max_num_batched_tokens=options.max_num_batched_tokens,
                speculation=speculation,
                prefix_cache=options.prefix_cache,
                prefix_replay=options.prefix_replay,
            ),
        )
        self.ranks = (LoadedRank(0, os.getpid(), 0, 0, 0.0),)
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._stack = ExitStack()
        self._fault = fault

    async def __aenter__(self) -> Self:
        # A fault must not outlive the engine, nor the next one begin before: they patch what all engines share.
        await _one_at_a_time().acquire()
        self._stack.callback(_one_at_a_time().release)
        self.patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        self._stack.enter_context(self.group)
        self._fault(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    async def stats(self) -> EngineStats:
        return self.core.stats

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        request = GenerateRequest("score", tuple(token_ids), SamplingParams(max_tokens=1))
        flat = [np.frombuffer(output.logits or b"", np.float32) async for output in self._run(request, score=True)]
        return np.concatenate(flat).reshape(len(token_ids), -1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for output in self._run(request):
            yield TokenChunk(output.token_ids, output.logprobs, len(request.prompt_token_ids), output.finish_reason)

    async def _run(
        self, request: GenerateRequest, *, score: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = request.prompt_token_ids
        added = AddRequest(request.request_id, ids, bytes(len(ids)), (), request.sampling, score)
        refusal = self.core.add(added)
        assert refusal is None, refusal
        mine = self._outputs[request.request_id] = []
        while True:
            await asyncio.sleep(0)  # all that are asked together are added before the first step
            if not mine:
                for output in self.core.step():
                    self._outputs[output.request_id].append(output)
            while mine:
                output = mine.pop(0)
                if output.error is not None:
                    raise EngineError(output.error)
                yield output
                if output.finish_reason is not None:
                    return
