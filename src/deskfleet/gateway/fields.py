"""The body of POST /v1/chat/completions, read strictly.

Owns which fields exist, their types and ranges, and one decision for every field the publisher's library
would drop. Knows nothing of prompts, tokens or the engine. Everything wrong is a RequestError whose `param`
is the field as the client spelled it.

* **Honoured:** the fields of `ChatFields`. Where a client gives temperature, top_p, top_k, min_p or seed, its
  value is used as it is; the library would force temperature 1 in thinking mode, lift top_p to 0.95 there and
  drop it elsewhere.
* **Refused:** the fields of `UNSUPPORTED`, unless their value asks for nothing (`n: 1`, `bad_words: []`).
* **Ignored:** `user`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key` and every field
  nobody here has heard of, because front-ends send all kinds of extras to every server that speaks this
  protocol. A name that is nearly a known one (`temprature`) is a mistake and refused with the nearest name.

Thinking may be asked for in four ways, which must not contradict each other: `thinking: {type: enabled |
disabled | adaptive}`, `enable_thinking`, `chat_template_kwargs: {thinking | enable_thinking}`, and
`reasoning_effort`, at the top or in `chat_template_kwargs`, where `none` means off and anything else means on unless a
switch says off. Without any of them the server's default holds. An effort is a name of `EFFORT_TIERS` or a whole
number from 1 to 100, which stands in the prompt as it is. How many tokens a thought may have is said by any of
`thinking_budget`, `thinking_token_budget`, `thinking: {budget_tokens}` and `chat_template_kwargs: {thinking_budget}`,
which must agree.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.messages import Message, ResponseFormat, Tool, ToolChoice

EFFORT_TIERS: dict[str, str | None] = {
    "none": None,  # thinking off
    "minimal": "low",
    "low": "low",  # rendered as 50 of 100
    "medium": "high",
    "high": "high",  # 75, also the model's default
    "xhigh": "xhigh",  # 75 as well, says the publisher
    "ultra": "max",
    "max": "max",  # 100
}
"""Effort as clients spell it -> the publisher's tier."""

_EFFORT_NUMBERS = range(1, 101)
_NUMBERED_TIERS = {50: "low", 75: "high", 100: "max"}

UNSUPPORTED: dict[str, tuple[object, str]] = {
    "n": (1, "one choice per request"),
    "best_of": (1, "one choice per request"),
    "use_beam_search": (False, "sampling only"),
    "length_penalty": (1, "there is no beam search to weigh"),
    "bad_words": ([], "bad_words is not supported"),
    "min_tokens": (0, "min_tokens is not supported"),
    "parallel_tool_calls": (True, "the model decides how many calls it makes"),
    "functions": ([], "send tools instead"),
    "function_call": ("auto", "send tool_choice instead"),
    "modalities": (["text"], "answers are text only"),
    "audio": ({}, "answers are text only"),
    "prediction": ({}, "predicted outputs are not supported"),
    "web_search_options": (None, "nothing is searched here; send a tool"),
    "verbosity": ("medium", "verbosity is not supported"),
    "store": (False, "nothing is stored here"),
    "reasoning": ({}, "send reasoning_effort instead"),
    "guided_json": (None, "send response_format instead"),
    "guided_regex": (None, "send response_format instead"),
    "guided_choice": (None, "send response_format instead"),
    "guided_grammar": (None, "send response_format instead"),
    "structured_outputs": (None, "send response_format instead"),
    "prompt_logprobs": (0, "prompt log probabilities are not supported"),
    "echo": (False, "the prompt is not repeated"),
    "include_stop_str_in_output": (False, "stop strings are never part of the answer"),
    "skip_special_tokens": (True, "control tokens are never part of the answer"),
    "chat_template": (None, "the prompt format is the model's own"),
    "documents": ([], "put documents into messages"),
    "add_generation_prompt": (True, "send a last assistant message with prefix: true"),
    "continue_final_message": (False, "send a last assistant message with prefix: true"),
    "truncate_prompt_tokens": (None, "prompts are never shortened"),
}
"""Field -> (the value that asks for nothing, why anything else is refused). Null always asks for nothing."""

_IGNORED = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)

Unit = Annotated[float, Meta(ge=0, le=1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ThinkingBudget = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Thinking(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None


class TemplateFields(Struct, frozen=True, forbid_unknown_fields=True):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | int | None = None
    thinking_budget: ThinkingBudget | None = None


class ChatFields(Struct, frozen=True, kw_only=True):
    """The fields this server honours. None means that the client said nothing."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateFields | None = None
    reasoning_effort: str | int | None = None
    thinking_budget: ThinkingBudget | None = None
    thinking_token_budget: ThinkingBudget | None = None


_VALUES = {
    "].role": "system, developer, user, assistant, tool, latest_reminder",
    "].type": "text and image_url in user, system and tool messages, text in assistant messages",
    "thinking.type": "enabled, disabled, adaptive",
    "response_format.type": "text, json_object, json_schema, regex",
    "].image_url.detail": "auto, low, high, original",
}
"""How a choice's path ends -> its values, which msgspec does not list."""

_KNOWN = (*ChatFields.__struct_fields__, *UNSUPPORTED, *_IGNORED)


def parse_fields(body: bytes) -> ChatFields:
    """Return the checked fields of a request body.

    Raises RequestError: not JSON, not an object, a field missing, of the wrong type, out of range,
    unsupported, misspelled, or contradicting another.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {_lower_first(str(error))}") from error
    if not isinstance(raw, dict):
        raise RequestError("the body is not a JSON object")
    _refuse_unsupported(raw)
    try:
        fields = msgspec.convert(raw, ChatFields, str_keys=True)  # the keys of logit_bias are token ids
    except msgspec.ValidationError as error:
        raise _name_field(error) from error
    _check_together(fields)
    return fields


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    for name, value in raw.items():
        if value is None or name in ChatFields.__struct_fields__ or name in _IGNORED:
            continue
        if name in UNSUPPORTED:
            neutral, reason = UNSUPPORTED[name]
            # True == 1 in Python, but `n: true` is no way to say `n: 1`.
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise RequestError(f"{name}: {reason}", param=name, hint=f"leave {name} out")
        elif nearest := difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.85):
            raise RequestError(f"unknown field {name!r}", param=name, hint=f"did you mean {nearest[0]!r}?")


def _name_field(error: msgspec.ValidationError) -> RequestError:
    """Turn msgspec's "Expected ... - at `$.messages[0].role`" into an error that names messages[0].role."""
    # A key of logit_bias is "at `key` in `$.logit_bias`", a value of it "at `$.logit_bias[...]`".
    reason, _, location = str(error).replace("`key` in ", "").partition(" - at `$")
    param = location.rstrip("`").lstrip(".").removesuffix("[...]")
    if missing := re.search(r"missing required field `(\w+)`", reason):
        param = f"{param}.{missing[1]}" if param else missing[1]
        reason = "this field is required"
    elif unknown := re.search(r"contains unknown field `(\w+)`", reason):
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        reason = "this field is not supported"
    elif values := next((text for suffix, text in _VALUES.items() if param.endswith(suffix)), None):
        reason = f"{reason}, known are {values}"
    return RequestError(f"{param}: {_lower_first(reason)}", param=param or None)


def _check_together(fields: ChatFields) -> None:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    limits = (fields.max_tokens, fields.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise RequestError(
            f"max_completion_tokens is {limits[1]} but max_tokens is {limits[0]}",
            param="max_completion_tokens",
        )
    if isinstance(fields.tool_choice, str) and fields.tool_choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice: {fields.tool_choice!r} is not auto, none, required or a function",
            param="tool_choice",
        )
    if fields.tool_choice not in (None, "auto", "none") and not fields.tools:
        raise RequestError("tool_choice asks for a call but tools is empty", param="tool_choice")


def requested_max_tokens(fields: ChatFields) -> int | None:
    """Return the client's limit, under either of its names."""
    return fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens


def requested_thinking_budget(fields: ChatFields) -> int | None:
    """Return the client's limit in tokens, under any of its names. Raises RequestError when two differ."""
    budgets = {
        "thinking_budget": fields.thinking_budget,
        "thinking_token_budget": fields.thinking_token_budget,
        "thinking.budget_tokens": fields.thinking.budget_tokens if fields.thinking else None,
        "chat_template_kwargs.thinking_budget": (
            fields.chat_template_kwargs or TemplateFields()
        ).thinking_budget,
    }
    asked = {name: budget for name, budget in budgets.items() if budget is not None}
    _refuse_contradiction(asked)
    return next(iter(asked.values()), None)


def resolve_thinking(fields: ChatFields, *, default: bool) -> tuple[bool, str | int | None]:
    """Return whether to think, and the effort: the publisher's tier, or a number that no tier stands for.

    An effort of None is the model's default.

    Raises RequestError for switches that contradict each other and for an unknown effort.
    """
    template = fields.chat_template_kwargs or TemplateFields()
    switches = {
        "thinking": None if fields.thinking is None else fields.thinking.type != "disabled",
        "enable_thinking": fields.enable_thinking,
        "chat_template_kwargs.thinking": template.thinking,
        "chat_template_kwargs.enable_thinking": template.enable_thinking,
    }
    asked = {name: wish for name, wish in switches.items() if wish is not None}
    efforts = {
        name: _effort(name, effort)
        for name, effort in (
            ("reasoning_effort", fields.reasoning_effort),
            ("chat_template_kwargs.reasoning_effort", template.reasoning_effort),
        )
        if effort is not None
    }
    if None in efforts.values():
        asked |= {name: False for name, effort in efforts.items() if effort is None}
    _refuse_contradiction(asked)
    _refuse_contradiction(efforts)
    effort = next(iter(efforts.values()), None)
    thinking = next(iter(asked.values()), True if efforts else default)
    return thinking, effort if thinking else None


def _effort(name: str, effort: str | int) -> str | int | None:
    if isinstance(effort, str) and effort in EFFORT_TIERS:
        return EFFORT_TIERS[effort]
    if isinstance(effort, int) and effort in _EFFORT_NUMBERS:
        return _NUMBERED_TIERS.get(effort, effort)
    raise RequestError(
        f"{name}: unknown effort {effort!r}",
        param=name,
        hint=f"use a whole number from 1 to 100, or one of {', '.join(EFFORT_TIERS)}",
    )


def _refuse_contradiction(wishes: dict[str, Any]) -> None:
    (first, wish), *rest = wishes.items() or [("", None)]
    for name, other in rest:
        if other != wish:
            raise RequestError(
                f"{name} contradicts {first}", param=name, hint=f"send only one of {first} and {name}"
            )


def _lower_first(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


__all__ = [
    "EFFORT_TIERS",
    "UNSUPPORTED",
    "ChatFields",
    "parse_fields",
    "requested_max_tokens",
    "requested_thinking_budget",
    "resolve_thinking",
]
