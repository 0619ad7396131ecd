"""docs/reference/gates.md: every gate as a table row, and how to read a verdict. Owns the words around the table."""

from __future__ import annotations

from dataclasses import fields

from deskfleet.gates.contract import Gate, Limits
from deskfleet.gates.family import FAMILIES
from deskfleet.gates.registry import ACCEPTANCE_GATES, LAUNCH_GATES

TITLE = "# Gates\n"

_INTRO = """\
A gate asks a server one question about itself and cannot be talked out of the answer. `deskfleet smoke` asks the
launch gates (seconds: may traffic open?), `deskfleet verify` those and the acceptance gates (minutes with `--quick`,
else hours: is this set-up good?). Both ask any OpenAI-compatible server, from any machine:

```
deskfleet smoke http://127.0.0.1:8000
deskfleet verify http://127.0.0.1:8000 --quick --evidence kept/
deskfleet smoke http://127.0.0.1:8000 --gate tool-calls --repeat 20
```
"""

_VERDICTS = """\
## Verdicts

* **pass**: it was shown. Lengths are the server's own token counts, never this client's guess.
* **fail**: it is not so. `cause` says whose fault it is: a wrong `answer`, a `refusal` of what should be taken, a
  `server` that failed or cannot be read, no answer in `time` (`--patience`), a `pace` that falls or is shared unevenly.
* **skip**: it could not be shown, with the reason; with the cause `tool` the gate itself could not do its work.

Gates that do not mind each other run side by side. One that fails beside others is asked again alone, and the reason
says how that went. Where answers are given side by side on purpose, a wrong one is asked again alone: right then, the
server mixes things up; wrong then too, the model itself is wrong, of which a family of questions allows a share.

## Exit codes

| code | meaning |
|---:|---|
| 0 | no gate failed, and at least one passed |
| 1 | a gate failed |
| 2 | bad input: a gate or a family of questions that does not exist, a file that holds no scores |
| 3 | nobody answers, nothing could be shown, or a gate could not do its work |

## Questions

A family of questions is chosen by the served model's name, or with `--questions`. The reason is printed.
`pocket` are questions that the embedded checkpoint was trained for (facts that only its Engram tables hold among
them), `general` those that every big model answers. Values are drawn anew for each run, so that no cache can know
them; `--seed` repeats a run, and every failure prints the command that does.

## What is kept

With `--evidence DIR`, and in a temporary directory when a gate fails: `report.json`, `report.xml` (JUnit),
`report.html` (one page that stands alone), and below each gate's name its exchanges, `NNN-right.json` and
`NNN-wrong.json`. `request` in them is a whole body that can be sent again. Of a soak, the first right ones and the
first wrong ones are kept, not all.

## Comparing configurations

`deskfleet verify URL --gate scoring --record-score a.json` keeps the log probabilities of a fixed text where the server
offers them (`POST /v1/completions` with `echo` and `logprobs`); `--score a.json` compares another configuration with
them: mean and largest difference, perplexity. For checkpoints on this machine, `deskfleet score` compares whole logits.

`lm-eval` prints the command that runs lm-evaluation-harness against the server, and judges its result file
(`--lm-eval-results`). In a checkout, `tools/lm_eval_env.sh var/lm-eval` installs that program; tasks that compare log
probabilities need a server that gives those of a prompt (`echo`).

## Pace

Rates are compared with each other within a run. Where the server is on the machine that asks, and that machine got
other work meanwhile (more threads want to run than before, and than it has cores), a rate that fell is a skip with the
cause `tool`: neither a pass nor the server's fault.
"""


def render_body() -> str:
    """Return the page without its title."""
    families = ", ".join(f"`{name}`" for name in FAMILIES)
    limits = ", ".join(
        f"{each.name} {each.default}" for each in fields(Limits) if isinstance(each.default, int | float)
    )
    return "\n".join(
        [
            _INTRO,
            "## Launch gates\n",
            _table(LAUNCH_GATES),
            "## Acceptance gates\n",
            _table(ACCEPTANCE_GATES),
            _VERDICTS,
            f"Families: {families}. Limits of a full run: {limits}.\n",
        ]
    )


def _table(gates: tuple[Gate, ...]) -> str:
    rows = [
        f"| `{gate.name}` | {gate.question} | {gate.threshold} | {gate.protects} |"
        f" {'alone' if gate.alone else 'beside others'}{'' if gate.is_quick else '; not with --quick'} |"
        for gate in gates
    ]
    head = "| gate | question | passes | protects | asked |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, ""])


__all__ = ["TITLE", "render_body"]
