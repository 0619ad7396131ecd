"""From a converted conversation to tokens: what every protocol with a conversation shares.

Owns the use of the publisher's library for prompts, and what is added to it. Knows nothing of HTTP, of bodies or of how
a protocol spells its answers.

* The prompt is counted with every image at its full span.
* The library knows efforts as tiers; another number takes the tier's place in the prompt (`ChatFormat.encode`).
* A call that must come is begun in the prompt, where the library would refuse that, in a thought: its grammar asks for
  it.
* Stop strings are matched by the library, in the answer and not in the reasoning; the engine never hears of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_recipe import (
    Conversation,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    ParsingOptions,
    ThinkingInitialStage,
)
from msgspec import Struct

from deskfleet.endpoint import Constraint, GenerateRequest, ImageInput, SamplingParams
from deskfleet.errors import PromptTooLong, RequestError
from deskfleet.gateway.answer_form import FormWishes, ResponseFormat, answer_constraint
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import UnknownModel
from deskfleet.gateway.fields import ConversationFields, SamplingFields
from deskfleet.gateway.images import ImageReference, RequestImage, read_images, ticket_number
from deskfleet.gateway.policies.contract import Caller, Draft, Wishes
from deskfleet.gateway.policies.images import IMAGE_LIMITS
from deskfleet.gateway.protocol import Prepared, refuse_unknown_ids
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.thinking import TIER_NUMBERS, Thought, resolve_thinking

ANY_MAX_TOKENS = 2**32 - 1
"""The library would cap max_tokens at 393,216; here the context is the limit."""


_SIGNS_OF_MARKUP = re.compile(rb"DSML|/think")
"""What a body holds, however its JSON is escaped, if some text in it spells a tag or the end of a thought."""


class Ask(Struct, frozen=True, kw_only=True):
    """One request after its protocol's module has read and converted it, before it is tokens.

    `conversation` is what is rendered: the conversion's own, or what it should have been. `functions` are all offered
    tools as Chat Completions spells a function. `max_calls` limits how many calls an answer may have. With
    `answer_is_begun` the prompt ends with the beginning of the answer; `starts_in_content` says so to the parser where
    the conversion does not know it.
    """

    conversion: ConversationRequest
    conversation: Conversation
    fields: SamplingFields
    thought: Thought
    images: Sequence[ImageReference] = ()
    functions: Sequence[dict[str, Any]] = ()
    must_call: bool = False
    max_calls: int | None = None
    response_format: ResponseFormat | None = None
    form_param: str = "response_format"
    schema_param: str = "response_format.json_schema.schema"
    answer_is_begun: bool = False
    starts_in_content: bool = False
    stop: str | Sequence[str] | None = None
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    prompt_param: str = "messages"
    logprobs: int | None = None


class PreparedConversation(Prepared, frozen=True, kw_only=True):
    """A conversation ready for the engine, and what the parser of its answer needs.

    With `quotes_markup` the request holds text that looks like markup, so the model may quote some.
    """

    conversion: ConversationRequest
    parsing: ParsingOptions
    tools: Mapping[str, dict[str, Any]] | None
    calls_are_begun: bool
    max_calls: int | None
    quotes_markup: bool
    echo: Any = None
    """What a protocol says again in its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spellings:
    """What a protocol calls things in errors: what the library's message mentions -> the field it is about."""

    fields: Mapping[str, str]
    otherwise: str
    path: re.Pattern[str] = field(default=re.compile(r"(?!)"))
    """Finds a path in a message, as its first group."""


class Conversations:
    """Conversations with one served checkpoint. Holds no state between requests; any thread may use it."""

    def __init__(self, settings: GatewaySettings, max_model_len: int, chat_format: ChatFormat) -> None:
        self.settings = settings
        self.max_model_len = max_model_len
        self.format = chat_format
        self.options = (
            ConversionOptions(
                thinking_max_tokens_upper_bound=ANY_MAX_TOKENS,
                non_thinking_max_tokens_upper_bound=ANY_MAX_TOKENS,
            )
            .with_model_versions_by_name({settings.model_id: chat_format.model_version})
            .with_special_tokens(chat_format.special_tokens)
        )

    def check_model(self, model: str) -> None:
        """Raise UnknownModel unless it is the one that is served."""
        if model != self.settings.model_id:
            raise UnknownModel(model, self.settings.model_id)

    def think(self, fields: ConversationFields) -> Thought:
        """Return what a request's wishes for thinking add up to."""
        return resolve_thinking(
            fields, default=self.settings.default_thinking, tiers_only=self.format.has_tiers_only
        )

    def convert(
        self, convert: Callable[[ConversionOptions], ConversationRequest], spellings: Spellings, strict: bool
    ) -> ConversationRequest:
        """Return the library's conversion. Raises RequestError with the field that its own error never says.

        `strict`: some tool promises its schema, so what the library says of schemas is about tools.
        """
        try:
            return convert(self.options)
        except OverflowError as error:  # it takes integers of 64 bits
            param = spellings.otherwise
            raise RequestError(f"{param}: an integer has more than 64 bits", param=param) from error
        except (ConversionError, ValueError) as error:
            raise name_conversion_error(str(error), spellings, strict=strict) from error

    def prompt(self, ask: Ask) -> tuple[list[int], list[RequestImage]]:
        """Return the prompt's ids, and its images in the order of their placeholders.

        Raises RequestError naming an image that cannot be used.
        """
        effort = ask.thought.effort
        number = None if effort in TIER_NUMBERS else effort
        if not ask.images:
            return self.format.encode(ask.conversation, number), []
        images = read_images(list(ask.images), self.format.config.vision, IMAGE_LIMITS.get() or self.settings)
        token_ids = self.format.encode(ask.conversation, number)
        rendered = self.format.encoding.render_conversation(ask.conversation)
        ordered = [images[ticket_number(source.data_url)] for source in rendered.image_sources]
        num_placeholders = token_ids.count(self.format.config.image_token_id or 0)
        if num_placeholders != len(images) or len(ordered) != len(images):
            raise RequestError(
                f"the prompt holds {num_placeholders} image placeholders for {len(images)} images",
                param=ask.prompt_param,
            )
        return token_ids, ordered

    def prepare(
        self, ask: Ask, body: bytes, request_id: str, caller: Caller, echo: Any = None
    ) -> PreparedConversation:
        """Return the request for the engine. Raises RequestError, and PromptTooLong when nothing can be answered."""
        token_ids, images = self.prompt(ask)
        num_prompt_tokens = count_tokens(token_ids, images) if images else len(token_ids)
        if num_prompt_tokens >= self.max_model_len:
            # A prompt that fills the context exactly leaves no room for the one token an answer needs.
            needed = 1 if num_prompt_tokens == self.max_model_len else None
            error = PromptTooLong(num_prompt_tokens, needed, self.max_model_len)
            error.param = ask.prompt_param
            raise error
        functions = _shown_functions(ask)
        calls_are_begun = bool(functions) and ask.conversation.tool_choice == "required"
        constraint = None
        if functions or ask.response_format is not None:
            form = FormWishes(
                functions=functions,
                calls_are_begun=calls_are_begun,
                must_call=ask.must_call,
                response_format=ask.response_format,
                answer_is_begun=ask.answer_is_begun,
                param=ask.form_param,
                schema_param=ask.schema_param,
            )
            constraint = answer_constraint(form, self.format.marker, self.format.calls)
        max_tokens = ask.max_tokens or self._default_max_tokens(ask, num_prompt_tokens)
        resolved = ask.conversion.inference_options
        sampling = sampling_params(
            ask.fields,
            vocab_size=self.format.config.vocab_size,
            max_tokens=max_tokens,
            logprobs=ask.logprobs,
            constraint=constraint,
            thinking_budget=ask.thought.budget,
            temperature=resolved.temperature,
            top_p=resolved.top_p,
        )
        return PreparedConversation(
            draft=Draft(
                generate=GenerateRequest(
                    request_id=request_id,
                    prompt_token_ids=tuple(token_ids),
                    sampling=sampling,
                    images=tuple([ImageInput(image.data) for image in images]),
                ),
                wishes=client_wishes(ask.fields, ask.thought, ask.max_tokens),
                caller=caller,
                model_id=self.settings.model_id,
                num_prompt_tokens=num_prompt_tokens,
                max_model_len=self.max_model_len,
                is_stream=bool(ask.fields.stream),
            ),
            thought=ask.thought,
            max_tokens_param=ask.max_tokens_param,
            conversion=ask.conversion,
            parsing=_parsing_options(ask),
            tools={f["name"]: f.get("parameters") or {} for f in functions} if functions else None,
            calls_are_begun=calls_are_begun,
            max_calls=ask.max_calls,
            quotes_markup=_SIGNS_OF_MARKUP.search(body) is not None,
            echo=echo,
        )

    def _default_max_tokens(self, ask: Ask, num_prompt_tokens: int) -> int:
        if self.settings.default_max_tokens is not None:
            return min(self.settings.default_max_tokens, self.max_model_len - num_prompt_tokens)
        return ask.conversion.resolve_max_tokens(num_prompt_tokens, self.max_model_len)


def _shown_functions(ask: Ask) -> list[dict[str, Any]]:
    """The offered tools that the prompt shows."""
    if not ask.functions or ask.conversation.tool_choice == "none":
        return []
    shown = {tool.name for tool in ask.conversation.tools}
    return [function for function in ask.functions if function["name"] in shown]


def count_tokens(token_ids: Sequence[int], images: Sequence[RequestImage]) -> int:
    """Return a prompt's tokens with every image at its full span."""
    return len(token_ids) + sum([image.num_tokens - 1 for image in images])


def sampling_params(
    fields: SamplingFields,
    *,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    constraint: Constraint | None,
    thinking_budget: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return how to sample: the client's word where it spoke, else `temperature` and `top_p`, else nothing special.

    Raises RequestError for ids that are not in the vocabulary.
    """
    stop_token_ids = tuple(fields.stop_token_ids or ())
    logit_bias = fields.logit_bias or {}
    if stop_token_ids:
        refuse_unknown_ids("stop_token_ids", stop_token_ids, vocab_size)
    if logit_bias:
        refuse_unknown_ids("logit_bias", logit_bias, vocab_size)
    if fields.temperature is not None:
        temperature = fields.temperature
    if fields.top_p is not None:
        top_p = fields.top_p
    repetition_penalty = fields.repetition_penalty
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple(logit_bias.items()),
        thinking_budget=thinking_budget,
        constraint=constraint,
        prompt_logprobs=prompt_logprobs,
    )


def client_wishes(fields: SamplingFields, thought: Thought | None, max_tokens: int | None) -> Wishes:
    """Return what the client said itself."""
    return Wishes(
        thinking=thought is not None and thought.on,
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        thinking_budget=thought.budget if thought is not None else None,
    )


def _parsing_options(ask: Ask) -> ParsingOptions:
    """How the library reads the answer. Calls reach it in one form only (`calls.py`), never begun."""
    options = ask.conversion.parsing_options
    options.starts_in_tool_calls = False
    if ask.stop is not None:
        options.stop_sequences = [ask.stop] if isinstance(ask.stop, str) else list(ask.stop)
    if ask.starts_in_content and ask.thought.on:
        options.thinking_initial_stage = ThinkingInitialStage.ContentContinuation
    return options


_STRICT_SCHEMA_ERRORS = ("required properties", "additionalproperties", "object with no properties")
"""What the library mentions when a strict schema, of a tool or of the answer, is not what strict means."""


def name_conversion_error(message: str, spellings: Spellings, *, strict: bool) -> RequestError:
    """Return the library's refusal with the field it is about."""
    if path := spellings.path.search(message):
        param = next(group for group in path.groups() if group is not None)
        param = re.sub(r"\.(\d+)", r"[\1]", param)  # one of the protocols counts with points
        return RequestError(message.removeprefix("."), param=param)
    lowered = message.lower()
    form_param = spellings.fields.get("response_format", "response_format")
    known = {**spellings.fields, **dict.fromkeys(_STRICT_SCHEMA_ERRORS, "tools" if strict else form_param)}
    param = next((param for text, param in known.items() if text in lowered), spellings.otherwise)
    return RequestError(message if param in message else f"{param}: {message}", param=param)


__all__ = [
    "Ask",
    "Conversations",
    "PreparedConversation",
    "Spellings",
    "client_wishes",
    "count_tokens",
    "name_conversion_error",
    "sampling_params",
]
