"""`LLM`: the engine as a plain object. Owns one background event loop; the work is the client's.

with LLM("checkpoint/", tp_size=2) as llm:
    for completion in llm.generate(["The river"], SamplingParams(temperature=0, max_tokens=16)):
        print(completion.text)
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from deskfleet.endpoint import FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.stopping import cut_at_stop
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.tokenizer import load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation. `text` ends before a stop string; `token_ids` hold every sampled token."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None


class LLM:
    """A running engine. Use as a context manager, or call close()."""

    def __init__(self, checkpoint: str | Path, **options: Any) -> None:
        """Start the ranks; keyword options are those of EngineOptions. Raises DeskfleetError."""
        opened = Checkpoint.open(Path(checkpoint))
        self.config = opened.config
        self.tokenizer = load_tokenizer(opened.directory)
        self._client = EngineClient(opened, EngineOptions(**options))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="deskfleet-llm", daemon=True)
        self._thread.start()
        try:
            self._call(self._client.start())
        except BaseException:
            # A signal may come before the start can be cancelled, or once it is done: only close() ends the ranks in
            # every case, and _stop_loop() waits for them.
            self._call(self._client.close())
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts at once (they share batches); one SamplingParams each, or one for all."""
        params = sampling if sampling is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = [self.encode(p) if isinstance(p, str) else _plain(p) for p in prompts]
        return self._call(self._generate_all(list(zip(ids, each, strict=True))))

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits float32 [len(token_ids), V]."""
        return self._call(self._client.score(_plain(token_ids)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, nothing added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def close(self) -> None:
        """Stop the ranks."""
        if self._thread.is_alive():
            self._call(self._client.close())
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _generate_all(self, work: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Completion]:
        tasks = [asyncio.ensure_future(self._generate_one(ids, params)) for ids, params in work]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # one that was refused, or Ctrl-C, ends the others too: nobody waits for them any more
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        reason: FinishReason = "abort"
        async for chunk in self._client.generate(GenerateRequest(uuid.uuid4().hex, prompt, params)):
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs or ()
            reason = chunk.finish_reason or reason
        shown = token_ids[:-1] if token_ids[-1:] == [self.config.eos_token_id] else token_ids
        text = cut_at_stop(self.tokenizer.decode(shown, skip_special_tokens=False), params.stop)
        return Completion(
            prompt, tuple(token_ids), text, reason, tuple(logprobs) if params.logprobs is not None else None
        )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C the work must not go on unseen
            raise

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_others_done(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _plain(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The same ids as Python integers: an array's own do not travel."""
    return tuple(int(i) for i in token_ids)


async def _others_done() -> None:
    """Wait until every other task of this loop has ended: a start that was interrupted still has ranks to end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


__all__ = ["LLM", "Completion"]
