"""One question through the unmodified `openai` client: the shortest proof that a server answers.

Owns the call and its times. `openai` is not a dependency of deskfleet, so it is imported when it is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from deskfleet.endpoint import Endpoint
from deskfleet.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What came back. `first_token_s` and `total_s` count from sending the question."""

    content: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of this one stream after its first token; None for fewer than two."""
        elapsed_s = self.total_s - self.first_token_s
        return (self.num_completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None


async def first_answer(endpoint: Endpoint, question: str, *, max_tokens: int) -> FirstAnswer:
    """Ask one question, streamed, greedy, without thinking.

    Raises ConfigError when `openai` is not installed, EngineError when the client reports an error.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError("the openai client is not installed", hint="pip install openai") from error
    begin = time.monotonic()
    first_token_s, finish_reason, usage = 0.0, "", None
    pieces: list[str] = []
    try:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=endpoint.model_id,
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"thinking": {"type": "disabled"}},
            )
            async for chunk in stream:
                first_token_s = first_token_s or time.monotonic() - begin
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    pieces.append(choice.delta.content or "")
                    finish_reason = choice.finish_reason or finish_reason
    except openai.OpenAIError as error:
        raise EngineError(f"the openai client got no answer: {error}") from error
    if usage is None or not finish_reason:
        raise EngineError("the answer ended before its end")
    return FirstAnswer(
        content="".join(pieces),
        finish_reason=finish_reason,
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        first_token_s=first_token_s,
        total_s=time.monotonic() - begin,
    )


__all__ = ["FirstAnswer", "first_answer"]
