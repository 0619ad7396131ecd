"""Write tests/gpu/pocket_answers.json: what the CPU engine answers to Pocket's questions, as token ids.

    .venv/bin/python tools/pocket_answers.py [QUESTIONS OF EACH TASK]

The questions are those of `deskfleet eval pocket`, asked through the gateway, so that prompts are what users send; a
test on a GPU needs neither then. Left out are questions with pictures and answers under a grammar.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from deskfleet.endpoint import GenerateRequest, TokenChunk
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.evaluation.run import EvalSettings, evaluate
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.model.embedded import POCKET, locate
from deskfleet.serve import ServeOptions, ServerThread

ANSWERS = Path(__file__).parents[1] / "tests" / "gpu" / "pocket_answers.json"


def main(num_questions: int) -> None:
    """Ask, and write the file."""
    answers: list[dict[str, Any]] = []
    generate = EngineClient.generate

    async def recorded(engine: EngineClient, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        token_ids: list[int] = []
        sampling, is_whole = request.sampling, False
        try:
            async for chunk in generate(engine, request):
                token_ids += chunk.token_ids
                is_whole = chunk.finish_reason is not None
                yield chunk
        finally:  # the gateway leaves after the last chunk
            if is_whole and not request.images and sampling.constraint is None and not sampling.stop:
                answers.append(
                    {
                        "prompt": list(request.prompt_token_ids),
                        "max_tokens": sampling.max_tokens,
                        "stop_token_ids": list(sampling.stop_token_ids),
                        "answer": token_ids,
                    }
                )

    EngineClient.generate = recorded  # type: ignore[method-assign]
    options = ServeOptions(
        gateway=GatewaySettings(model_id=POCKET, checkpoint=locate(POCKET), port=0), engine=EngineOptions()
    )
    with ServerThread(options) as ready:
        asyncio.run(evaluate(ready.endpoint.url, EvalSettings(num_questions=num_questions)))
    answers.sort(key=lambda answer: (len(answer["prompt"]), answer["prompt"]))
    lines = ",\n".join(json.dumps(answer, separators=(",", ":")) for answer in answers)
    ANSWERS.write_text(f"[\n{lines}\n]\n")
    print(f"{len(answers)} answers in {ANSWERS}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
