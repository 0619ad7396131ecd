"""A runner that runs each distinct forward once and replays it, so that a core can be asked a hundred thousand times.

Owns the memory of logits. What it replays comes from the real model: logits of a step by the tokens before it and in
it, logits of a draft by the tokens before its block, its place and the token before it. Which drafts are drawn is
decided anew for every request, by its own coins. Knows nothing of acceptance or of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from deskfleet.engine.batch import Segment
from deskfleet.engine.messages import DraftRequest
from deskfleet.engine.model.draft import Anchor, Proposal
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import Coins, draft_choice
from deskfleet.engine.wanted import Choice, Outcome, outcome_of
from tests.engine.golden import give_every_slot_its_blocks, token_map

Tokens = tuple[int, ...]

LIFT = 100.0
"""Added to the draft logits of the tokens that may be drafted: the others have no chance beside them."""


class MemoRunner:
    """Stands in for a ModelRunner with drafts and uses its slots for itself.

    A drafter of random weights knows nothing of the target. So its drafts are confined to the tokens `draftable`, at
    their real logits among each other, and to the first `depth` places of a block. Verification is exact for any
    drafter, hence for this one.
    """

    def __init__(self, runner: ModelRunner, *, draftable: Sequence[int], depth: int) -> None:
        give_every_slot_its_blocks(runner)
        self.config, self.limits = runner.config, runner.limits
        self.num_forwards = 0
        self._runner = runner
        self._draftable, self._depth = list(draftable), depth
        self._held: dict[int, Tokens] = {}  # by slot of the core
        self._logits: dict[tuple[Tokens, Tokens], torch.Tensor] = {}  # (before, rows): float32 [rows, V]
        self._drafts: dict[
            Tokens, dict[int, Proposal]
        ] = {}  # by all tokens so far, then by the one before a place

    def lead(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        image_rows: torch.Tensor | None = None,
        updates: Sequence[Any] = (),
        choices: Sequence[Choice] = (),
    ) -> Outcome:
        """As ModelRunner.lead, for text."""
        keys = []
        for segment in segments:
            before = self._held[segment.slot][: segment.start] if segment.start else ()
            rows = tuple(segment.token_ids.tolist())
            self._held[segment.slot] = before + rows
            keys.append((before, rows))
        self._run(dict.fromkeys(key for key in keys if key not in self._logits))
        rows = [*logit_rows, *(choice.row for choice in choices)]
        return outcome_of(torch.cat([self._logits[key] for key in keys])[rows], choices)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """As ModelRunner.propose, up to `depth`."""
        contexts = [(*self._held[r.slot][: r.position], r.token_id) for r in requests]
        self._draft(dict.fromkeys(context for context in contexts if context not in self._drafts))
        blocks = [
            self._block(r, self._drafts[context]) for r, context in zip(requests, contexts, strict=True)
        ]
        return Proposal(*(torch.stack(parts) for parts in zip(*blocks, strict=True)))

    def _block(
        self, request: DraftRequest, after: dict[int, Proposal]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What DraftModel chains place by place, for one request: ids [depth], logits [depth, V], confidences."""
        ids: list[int] = []
        logits, confidence = [], []
        previous = self._draftable[0]  # any: the first place has the anchor before it
        for place in range(self._depth):
            known = after[previous]
            logits.append(known.logits[place])
            confidence.append(known.confidence[place])
            previous = draft_choice(
                logits[-1].numpy(),
                request.temperature,
                coins=Coins(request.seed),
                place=request.place,
                index=place,
            )
            ids.append(previous)
        return torch.tensor(ids), torch.stack(logits), torch.stack(confidence)

    # --- the real model -------------------------------------------------------------------------------

    def _run(self, keys: Iterable[tuple[Tokens, Tokens]]) -> None:
        for some in _portions(keys, self.limits.max_num_seqs):
            self._read([before for before, _ in some])
            segments = [text_segment(slot, before, rows) for slot, (before, rows) in enumerate(some)]
            sizes = [len(rows) for _, rows in some]
            logits = self._runner.lead(segments, range(sum(sizes))).logits
            self._logits |= zip(some, logits.clone().split(sizes), strict=True)
            self.num_forwards += 1

    @torch.inference_mode()
    def _draft(self, contexts: Iterable[Tokens]) -> None:
        """Every context once for each draftable token, drafted at every place."""
        drafts, forced = self._runner.drafts, torch.tensor(self._draftable)
        assert drafts is not None
        for some in _portions(contexts, self.limits.max_num_seqs):
            self._read([context[:-1] for context in some])
            for slot, context in enumerate(some):
                anchors = [Anchor(slot, len(context) - 1, context[-1])] * len(forced)
                found = drafts.propose(
                    anchors, self._runner.tables, self._runner.cache, choose=lambda place, logits: forced
                )
                logits = found.logits.clone()
                logits[..., forced] += LIFT
                rows = zip(found.draft_token_ids, logits, found.confidence, strict=True)
                self._drafts[context] = {
                    token: Proposal(*row) for token, row in zip(self._draftable, rows, strict=True)
                }
                self.num_forwards += 1

    def _read(self, contexts: Sequence[Tokens]) -> None:
        """Bring slot i to the end of the i-th context."""
        segments = [text_segment(slot, (), context) for slot, context in enumerate(contexts) if context]
        if segments:
            self._runner.lead(segments, [])
            self.num_forwards += 1


def text_segment(slot: int, before: Tokens, rows: Tokens) -> Segment:
    """The positions of `rows`, which follow `before`."""
    ids, start = np.array(before + rows, np.int64), len(before)
    compressed = token_map()[ids]
    history = compressed[max(start - 3, 0) : start]
    return Segment(slot, start, ids[start:], compressed[start:], history, np.zeros(len(rows), bool))


def _portions(items: Iterable[Any], size: int) -> list[list[Any]]:
    rest = list(items)
    return [rest[start : start + size] for start in range(0, len(rest), size)]
