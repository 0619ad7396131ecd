"""Every gate, in the order in which they are asked. A new gate is a module, and a line here."""

from __future__ import annotations

from deskfleet.gates.acceptance.churn import CHURN
from deskfleet.gates.acceptance.harness import LM_EVAL
from deskfleet.gates.acceptance.ladder import LADDER
from deskfleet.gates.acceptance.long_prompt import LONG_PROMPT
from deskfleet.gates.acceptance.pace import FAIRNESS, SPEED_AT_DEPTH, STEADY_SPEED
from deskfleet.gates.acceptance.prefix import PREFIX_CACHE
from deskfleet.gates.acceptance.quality import QUALITY
from deskfleet.gates.acceptance.scoring import SCORING
from deskfleet.gates.acceptance.soak import SOAK
from deskfleet.gates.contract import Gate
from deskfleet.gates.launch.answers import AT_ONCE, BY_LENGTH, OPEN_TEXT, SHORT_ANSWERS
from deskfleet.gates.launch.context import CONTEXT, NEEDLE
from deskfleet.gates.launch.counting import COUNTING
from deskfleet.gates.launch.facts import FACTS
from deskfleet.gates.launch.finish import FINISH_REASON
from deskfleet.gates.launch.image import IMAGE
from deskfleet.gates.launch.json_form import JSON
from deskfleet.gates.launch.logprobs import LOGPROBS
from deskfleet.gates.launch.model import MODEL
from deskfleet.gates.launch.repeats import REPEATS
from deskfleet.gates.launch.thinking import EFFORT, THINKING
from deskfleet.gates.launch.tools import TOOL_CALLS
from deskfleet.gates.launch.usage import USAGE

LAUNCH_GATES: tuple[Gate, ...] = (
    MODEL,
    SHORT_ANSWERS,
    REPEATS,
    AT_ONCE,
    COUNTING,
    OPEN_TEXT,
    LOGPROBS,
    TOOL_CALLS,
    JSON,
    IMAGE,
    THINKING,
    EFFORT,
    FACTS,
    FINISH_REASON,
    USAGE,
    CONTEXT,
    BY_LENGTH,
    NEEDLE,
)

ACCEPTANCE_GATES: tuple[Gate, ...] = (
    PREFIX_CACHE,
    FAIRNESS,
    STEADY_SPEED,
    SPEED_AT_DEPTH,
    CHURN,
    *QUALITY,
    SCORING,
    LM_EVAL,
    SOAK,
    LADDER,
    LONG_PROMPT,
)

__all__ = ["ACCEPTANCE_GATES", "LAUNCH_GATES"]
