"""Answers that must have a form: JSON, a schema, a regular expression, a grammar. Token by token, with llguidance.

Owns which tokens may come next, and what a constraint may ask for. Knows nothing of thoughts, of logits, or of when a
constraint begins to hold (`sampler.SamplingState` does).

Text is matched by its bytes, however it is cut into tokens. The tokenizer's added tokens are no text: neither
`</think>` nor a turn token can stand inside a JSON string. A grammar names one by its id, as `<[509]>`.
"""

from __future__ import annotations

import json
import textwrap
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from deskfleet.endpoint import Constraint
from deskfleet.errors import RequestError
from deskfleet.model.tokenizer import DSML

_MAX_TEXT_BYTES = 128 * 1024
"""Compiling takes 0.5 ms for what people send, 30 ms for 30 strict tools, 0.3 s for the worst found of this size."""

_MAX_COMPILED = 64

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace in one place of JSON. Without a bound, a model that has lost its way fills its answer with newlines."""


def check_constraint(constraint: Constraint) -> None:
    """Raise RequestError, with the constraint's own `param`, when it cannot be compiled. Needs no tokenizer."""
    is_error, reasons = LLMatcher.validate_grammar_with_warnings(_grammar(constraint))
    if is_error:  # otherwise the reasons are warnings: what a lenient schema leaves out
        raise _refusal(constraint, reasons[0])


class ConstraintCompiler:
    """Compiles constraints for one tokenizer; keeps the latest, since agents send the same ones again and again."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        """Takes 0.8 s and 95 MB for a vocabulary of 129,280, so once per process."""
        self._tokenizer = LLTokenizer(
            _without_text_tokens(tokenizer), n_vocab=vocab_size, eos_token=eos_token_id
        )
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        dsml = tokenizer.token_to_id(DSML)
        self._barred = np.array([eos_token_id] if dsml is None else [eos_token_id, dsml])
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    def begin(self, constraint: Constraint) -> None:
        """Start compiling in a thread, so that it is done when the prompt is. Raises RequestError as `compile` does."""
        self._compilation(_grammar(constraint))

    def compile(self, constraint: Constraint) -> TokenConstraint:
        """Return the constraint at its beginning. Raises RequestError as `check_constraint` does."""
        matcher = self._compilation(_grammar(constraint)).result()
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        return TokenConstraint(
            matcher.deep_copy(), constraint, self._vocab_size, self._eos_token_id, self._barred
        )

    def _compilation(self, grammar: str) -> Future[LLMatcher]:
        compilation = self._compiled.pop(grammar, None)
        if compilation is None:
            compilation = self._worker.submit(LLMatcher, self._tokenizer, grammar, log_level=0)
        self._compiled[grammar] = compilation
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compilation


class TokenConstraint:
    """Where one answer stands in its grammar.

    The end-of-sequence token may come exactly when the grammar accepts, and after it only itself.
    `barred_while_thinking`, int64: the end of sequence and the tool-call marker. Neither may come in a thought,
    where it would end the answer, or begin a call, with nothing to hold it to its form.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        constraint: Constraint,
        vocab_size: int,
        eos_token_id: int,
        barred_while_thinking: np.ndarray,
    ) -> None:
        self.barred_while_thinking = barred_while_thinking
        self._matcher = matcher
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._num_ends = 0  # the matcher does not take the end of sequence once nothing else can follow

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [V]. Raises RequestError when the grammar's limits are exhausted."""
        mask = np.zeros(self._vocab_size, bool)
        if self._num_ends:
            mask[self._eos_token_id] = True
            return mask
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise _refusal(self._constraint, self._matcher.get_error())
        mask[:] = bits[: self._vocab_size]
        return mask

    def consume(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changed, when it may not come here."""
        if token_id == self._eos_token_id:
            if self._num_ends or self._matcher.is_accepting():
                self._num_ends += 1
                return True
            return False
        return not self._num_ends and self._matcher.try_consume_tokens([token_id]) == 1

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` that were consumed."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends:
            self._matcher.rollback(num_tokens - ends)


def _grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own form, not checked beyond size and JSON syntax."""
    size_bytes = len(constraint.text.encode())
    if size_bytes > _MAX_TEXT_BYTES:
        raise _refusal(constraint, f"{size_bytes} bytes, but at most {_MAX_TEXT_BYTES} can be compiled")
    try:
        match constraint.kind:
            case "json_object" | "json_schema":
                schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
                return LLMatcher.grammar_from_json_schema(
                    schema, defaults={"whitespace_pattern": _WHITESPACE}
                )
            case "regex":
                return LLMatcher.grammar_from_regex(constraint.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(constraint.text)
    except ValueError as error:
        raise _refusal(constraint, str(error)) from error


def _without_text_tokens(tokenizer: Tokenizer) -> str:
    """tokenizer.json with every added token marked special, which for llguidance means: no text."""
    plain = json.loads(tokenizer.to_str())
    for token in plain["added_tokens"]:
        token["special"] = True
    return json.dumps(plain)


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    kind = constraint.kind.replace("_", " ")
    # The library draws where in the text the fault is, over several lines.
    sentence = textwrap.shorten(reason, width=300, placeholder=" ...")
    return RequestError(
        f"{constraint.param}: this {kind} cannot be enforced: {sentence}", param=constraint.param
    )


__all__ = ["ConstraintCompiler", "TokenConstraint", "check_constraint"]
