"""When to give up a stream that says nothing. Owns the decision; knows nothing of HTTP or of either engine.

Silence alone proves nothing: a prompt may be long, and a queue longer. So a silent stream looks at the engine
itself. One that does not answer is gone, one whose counters stand still is stuck, and one that moves is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from deskfleet.errors import EngineError
from deskfleet.gateway.upstream.failures import UpstreamFailed
from deskfleet.gateway.upstream.options import UpstreamOptions

_LONGEST_PASS_TOKENS = 16_384  # no engine runs more of a prompt without counting a step
_FRESH_S = 0.25  # silent streams of the same engine share one look


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at an engine showed. `marker` changes with every step it makes; None: it can only say it lives."""

    answered: bool
    marker: Hashable | None = None


class Pulse:
    """Whether an engine still moves. `read` returns its marker and raises EngineError when it does not answer."""

    def __init__(self, read: Callable[[], Awaitable[Hashable | None]]) -> None:
        self._read = read
        self._looking: asyncio.Task[Look] | None = None
        self._looked_at_s = float("-inf")

    async def look(self) -> Look:
        """Look now, or take part in a look that has just been made."""
        now_s = asyncio.get_running_loop().time()
        if self._looking is None or (self._looking.done() and now_s - self._looked_at_s > _FRESH_S):
            self._looking = asyncio.create_task(self._look())
            self._looked_at_s = now_s
        return await asyncio.shield(self._looking)

    async def _look(self) -> Look:
        for _ in range(2):  # one missed probe is no death
            try:
                return Look(True, await self._read())
            except EngineError:
                continue
        return Look(False)

    async def close(self) -> None:
        """End a look under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class SilenceWatch:
    """Watches one stream from `start` to `stop`; `on_silent` is told once, with why it must end.

    `longest_prompt` says how many tokens the longest prompt in the engine has that is still being read.
    `deadline_s` is a time of the event loop's clock after which the stream ends whatever happens.
    """

    def __init__(
        self,
        url: str,
        pulse: Pulse,
        options: UpstreamOptions,
        longest_prompt: Callable[[], int],
        deadline_s: float | None = None,
    ) -> None:
        self._url = url
        self._pulse = pulse
        self._options = options
        self._longest_prompt = longest_prompt
        self.deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._started_s = self._heard_s = self._still_since_s = self._loop.time()
        self._marker: Hashable | None = None
        self._is_paused = False
        self._on_silent: Callable[[EngineError], None] = lambda error: None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def rest_s(self) -> float | None:
        """Seconds left until the deadline, 0 when it has passed; None without one."""
        return None if self.deadline_s is None else max(self.deadline_s - self._loop.time(), 0.0)

    def start(self, on_silent: Callable[[EngineError], None]) -> None:
        """Begin to watch, from now."""
        self._on_silent = on_silent
        self._heard_s = self._loop.time()
        self._arm(self._options.silence_s)

    def heard(self) -> None:
        """Something has arrived, or we listen again."""
        self._heard_s = self._loop.time()
        self._is_paused = False

    def pause(self) -> None:
        """Until `heard`, nobody listens: what is silent is not the engine."""
        self._is_paused = True

    def limit(self, rest_s: float) -> None:
        """From now on the stream may go on for `rest_s` seconds at most."""
        self.stop()
        self.deadline_s = self._loop.time() + rest_s
        self._arm(rest_s)

    def stop(self) -> None:
        """Watch no longer. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _arm(self, delay_s: float) -> None:
        if self.deadline_s is not None:
            delay_s = min(delay_s, max(self.deadline_s - self._loop.time(), 0.0))
        self._timer = self._loop.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        now_s = self._loop.time()
        if self.deadline_s is not None and now_s >= self.deadline_s:
            self._on_silent(EngineError(f"the deadline passed after {now_s - self._started_s:.1f} s"))
            return
        rest_s = self._options.silence_s - (now_s - self._heard_s)
        if self._is_paused:
            self._arm(self._options.silence_s)
        elif rest_s > 0:  # the usual case: one timer for the whole stream, moved on, never set per chunk
            self._arm(rest_s)
        else:
            self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        asked_s = self._loop.time()
        reason = await self._why_give_up()
        if reason is not None and self._heard_s < asked_s and not self._is_paused:
            self._on_silent(UpstreamFailed(reason))
        else:
            self._arm(self._options.silence_s / 2)

    async def _why_give_up(self) -> str | None:
        silent_s = self._loop.time() - self._heard_s
        if silent_s > self._options.longest_silence_s:
            return f"{self._url} has sent nothing for {silent_s:.0f} s"
        look = await self._pulse.look()
        now_s = self._loop.time()
        if not look.answered:
            return f"{self._url} has stopped answering, and sent nothing for {now_s - self._heard_s:.1f} s"
        if look.marker is None:
            return None
        if look.marker != self._marker:
            self._marker, self._still_since_s = look.marker, now_s
            return None
        still_s = now_s - self._still_since_s
        if still_s < self._patience_s():
            return None
        return f"{self._url} answers, but its engine has done nothing for {still_s:.1f} s"

    def _patience_s(self) -> float:
        tokens = min(self._longest_prompt(), _LONGEST_PASS_TOKENS)
        return self._options.stall_s + tokens / self._options.prefill_tokens_per_s


__all__ = ["Look", "Pulse", "SilenceWatch"]
