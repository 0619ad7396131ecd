"""GET /openapi.json: every route of the gateway, what it takes and what it answers.

Owns the description. Request schemas are those of the structs that bodies are checked with, so they cannot differ; what
holds between fields is said by errors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from deskfleet.gateway.protocols import (
    chat_fields,
    completions,
    messages_fields,
    responses_fields,
    tokens,
)
from deskfleet.gateway.thinking import HEADER

_REFERENCE = "#/components/schemas/{name}"

_REQUESTS: Mapping[str, tuple[type, ...]] = {
    "/v1/chat/completions": (chat_fields.ChatFields,),
    "/v1/responses": (responses_fields.ResponsesFields,),
    "/v1/messages": (messages_fields.MessagesFields,),
    "/v1/completions": (completions.CompletionFields,),
    "/v1/messages/count_tokens": (messages_fields.MessagesFields,),
    "/tokenize": (tokens.TokenizeFields, chat_fields.ChatFields),
    "/detokenize": (tokens.DetokenizeFields,),
}

_SUMMARIES: Mapping[str, str] = {
    "/v1/chat/completions": "OpenAI Chat Completions",
    "/v1/responses": "OpenAI Responses; nothing is stored",
    "/v1/messages": "Anthropic Messages",
    "/v1/completions": "Plain completions, without a chat template",
    "/v1/messages/count_tokens": "How many tokens a Messages request would have",
    "/tokenize": "The tokens of a prompt or a chat",
    "/detokenize": "The text of tokens",
}

_STREAMS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"})

_OBJECT: dict[str, Any] = {"type": "object"}
_ANSWERS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": _OBJECT,
    "/v1/responses": _OBJECT,
    "/v1/messages": _OBJECT,
    "/v1/completions": _OBJECT,
    "/v1/messages/count_tokens": {
        "type": "object",
        "required": ["input_tokens"],
        "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
    },
    "/tokenize": {
        "type": "object",
        "required": ["count", "max_model_len", "tokens"],
        "properties": {
            "count": {"type": "integer", "minimum": 0},
            "max_model_len": {"type": "integer", "minimum": 1},
            "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    },
    "/detokenize": {
        "type": "object",
        "required": ["prompt"],
        "properties": {"prompt": {"type": "string"}},
    },
}

_OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

_FAILURES: Mapping[str, str] = {
    "400": "The request is wrong; the message names the field",
    "401": "No key, or none of this server's",
    "403": "The key may not do this",
    "404": "No such model",
    "413": "The body is too large",
    "429": "A limit of the key, or a full queue",
    "500": "A bug; the server's log says more",
    "503": "The engine cannot answer; the message says why",
    "504": "The request ran for longer than it may",
}

_MODEL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer", "minimum": 1},
    },
}


@lru_cache(maxsize=4)
def render_description(model_id: str) -> bytes:
    """Return the description of a gateway that serves `model_id`, as JSON."""
    structs = tuple(dict.fromkeys(struct for each in _REQUESTS.values() for struct in each))
    references, components = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    by_struct = dict(zip(structs, references, strict=True))
    for reference in references:
        _name_model(components[reference["$ref"].rpartition("/")[2]]["properties"]["model"], model_id)
    schemas = {
        **components,
        "OpenAIError": _OPENAI_ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "Model": _MODEL,
    }
    posts = {
        path: {"post": _post(path, [by_struct[each] for each in kinds])} for path, kinds in _REQUESTS.items()
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "deskfleet", "version": "1"},
            "paths": {**posts, **_gets()},
            "components": {"schemas": schemas},
        }
    )


def _name_model(schema: dict[str, Any], model_id: str) -> None:
    """Say which model may be asked for: there is one."""
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") == "string":
            kind["enum"] = [model_id]


def _post(path: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    content: dict[str, Any] = {"application/json": {"schema": _ANSWERS[path]}}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": {"description": "one event of the stream"}}
    headers = {
        HEADER: {
            "description": "Whether the model thinks, how hard, and which field decided",
            "schema": {"type": "string"},
        }
    }
    return {
        "summary": _SUMMARIES[path],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer", "content": content, "headers": headers},
            **_failures("AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"),
        },
    }


def _failures(schema: str) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(name=schema)}
    content = {"application/json": {"schema": reference}}
    return {status: {"description": text, "content": content} for status, text in _FAILURES.items()}


def _gets() -> dict[str, Any]:
    model = {"$ref": _REFERENCE.format(name="Model")}
    models = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": model}},
    }
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models": {"get": _get("The one model that is served", models)},
        "/v1/models/{model}": {"get": {**_get("The same by its name", model), "parameters": [name]}},
        "/openapi.json": {"get": _get("This description", _OBJECT)},
        "/health": {
            "get": _get("200 while the engine can answer, else 503 with the reason", _OBJECT, _OBJECT)
        },
        "/metrics": {"get": _get("Counters in Prometheus' text format", None)},
    }


def _get(
    summary: str, schema: dict[str, Any] | None, unhealthy: dict[str, Any] | None = None
) -> dict[str, Any]:
    kind = "text/plain" if schema is None else "application/json"
    content = {kind: {"schema": schema or {"type": "string"}}}
    responses = {
        "200": {"description": "The answer", "content": content},
        **_failures("OpenAIError"),
    }
    if unhealthy is not None:
        content = {"application/json": {"schema": unhealthy}}
        responses["503"] = {"description": "It cannot answer", "content": content}
    return {"summary": summary, "responses": responses}


__all__ = ["render_description"]
