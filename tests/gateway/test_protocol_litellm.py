"""LiteLLM as an unmodified client: its SDK, in an environment of its own (tools/litellm_env.sh), in all its ways."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from chat_scripts import MODEL, call_markup, requesting, says, text_of

from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import Script, ScriptedEngine

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "var" / "litellm" / "bin" / "python"
PATIENCE_S = 300.0
NUM_TURNS = 20

needs_litellm = pytest.mark.skipif(
    not PYTHON.exists(), reason="LiteLLM is not there: tools/litellm_env.sh var/litellm makes its environment"
)

OSLO = call_markup(("weather", {"city": ("Oslo < Bergen", True)}))


def model(request: GenerateRequest) -> Script:
    """Answers the latest word of the user; a thought that the prompt has opened is closed first."""
    prompt = text_of(request.prompt_token_ids)
    asked = prompt.rpartition("<｜User｜>")[2]
    opening = "A thought.</think>" if prompt.endswith("<think>") else ""
    num_results = prompt.count(" degrees")
    if "count" in prompt and num_results < NUM_TURNS:
        return says(f"{opening}Turn.{call_markup(('weather', {'city': (f'City {num_results}', True)}))}")
    if "count" in prompt:
        return says(f"{opening}Done.")
    if "call" in asked:
        return says(f"{opening}Let me see.{OSLO}")
    return says(f"{opening}Hello to all of you.")


@pytest.mark.slow(reason="half a minute, of which importing LiteLLM is most")
@needs_litellm
async def test_litellm() -> None:
    async with requesting(ScriptedEngine(model, max_model_len=20_000)) as (_, url):
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            Path(__file__).parent / "litellm_client.py",
            url,
            MODEL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        )
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, err.decode()[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    said = {"text": "Hello to all of you.", "thought": None, "calls": [], "ending": "stop", "has_usage": True}
    called = said | {
        "text": "Let me see.",
        "calls": [["weather", {"city": "Oslo < Bergen"}]],
        "ending": "tool_calls",
    }
    thought = said | {"thought": "A thought."}
    many = {"many": True}
    assert found["plain"] == found["image"] == said
    assert found["stream"] == said | many
    assert found["tools"] == called
    assert found["tools, streamed"] == called | many
    assert found["thought, vllm"] == thought
    assert found["thought, deepseek"] == found["anthropic, streamed"] == thought | many
    assert found["anthropic"]["calls"] == called["calls"]
    assert found["anthropic"]["ending"] == "tool_calls"
    assert found["messages"] == [["thinking", "A thought."], ["text", "Hello to all of you."]]
    assert found["responses"] == ["completed", ["Hello to all of you."]]
    for name in ("agent", "agent, vllm", "agent, anthropic"):
        assert found[name] == {"num_turns": NUM_TURNS, "text": "Done."}, name
    assert found["too long"] == found["too long, anthropic"] == "ContextWindowExceededError"
    assert found["wrong model"] == "NotFoundError"
    assert found["bad field"] == "BadRequestError"


def test_the_script_names_the_version_that_the_benchmark_names() -> None:
    """One environment serves both."""
    script = (ROOT / "tools" / "litellm_env.sh").read_text()
    bench = (ROOT / "src" / "deskfleet" / "bench" / "gateway" / "processes.py").read_text()
    version = re.search(r"^version=(\S+)$", script, re.MULTILINE)
    assert version is not None
    assert f"litellm[proxy]=={version[1]}" in bench or "tools/litellm_env.sh" in bench
