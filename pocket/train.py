"""Trains Pocket, in pieces that resume: `python -m pocket.train --stage base --minutes 9 --out DIR`.

Owns the loop: which parameters learn from which losses, the clock, the log. A piece ends before its time is over and
leaves the compact state in DIR (and the whole one in --scratch); the next one goes on from the newest of both. The log
is DIR/log.jsonl, one object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskfleet.model.config import ModelConfig
from deskfleet.testing.tiny_config import TinySizes
from deskfleet_engram.tokens import compressed_token_map
from pocket.batch import collate
from pocket.data.stream import MIXTURES, rows
from pocket.export import named_parameters_of
from pocket.feed import DeviceBatch, Feed, host_batch, to_device
from pocket.model.draft import Anchors, draft_losses, make_model
from pocket.model.indexer import imitation_loss
from pocket.model.numerics import Numerics, fuse_pointwise
from pocket.model.rows import Rows
from pocket.optimiser import Optimiser, steer_router
from pocket.sizes import POCKET, SMOKE, pocket_config
from pocket.stages import PLANS, Phase, Stage
from pocket.state import STAGES, Progress, State, load_newest, save_compact, save_whole
from pocket.tokenizer import DIRECTORY

_BALANCE_WEIGHT = 1e-3
_INDEX_WEIGHT = 0.3
_STEER_RATE = 1e-3
_SAMPLED = 64  # tokens of a row whose attention the indexers imitate
_ANCHORS = 64  # drafted blocks of a row
_HELD_OUT_ROWS, _HELD_OUT_TOKENS = 2, 1024  # rows of each task, and their length
_SAVE_RESERVE_S = 20.0


@dataclass(frozen=True)
class Options:
    """One piece of training."""

    stage: Stage
    out: Path
    scratch: Path
    minutes: float
    batch_tokens: int
    num_workers: int
    seed: int
    resume: tuple[Path, ...]
    device: str
    repeat: int = 1
    fresh: bool = False
    exact: bool = False
    sizes: TinySizes = POCKET
    log_every: int = 20
    evaluate_every: int = 200
    save_every_s: float = 150.0
    max_norm: float = 1.0


class Trainer:
    """A model, its optimiser and how far they came."""

    def __init__(self, options: Options) -> None:
        self.options, self.stage = options, options.stage
        self.device = torch.device(options.device)
        tokenizer = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
        self.published = pocket_config(tokenizer, options.sizes)
        self.config = ModelConfig.from_dict(self.published)
        token_map = torch.from_numpy(compressed_token_map(tokenizer).astype(np.int64))
        backbone, drafter = make_model(self.config, token_map, options.seed)
        self.backbone, self.drafter = backbone.to(self.device), drafter.to(self.device)
        self.progress = Progress(self.stage.name, 0, 0)
        self.steps_here = 0
        state = None if options.fresh else load_newest([*options.resume, options.out, options.scratch])
        if state is not None:
            self._adopt(state)
        self.optimiser = Optimiser(self._trained())
        self.fresh = not self._adopt_optimiser(state)
        # Another piece must not see the same rows again.
        self.data_seed = options.seed + self.progress.step + 1_000_003 * _stage_number(self.stage)
        self.generator = torch.Generator(self.device).manual_seed(self.data_seed)

    def _adopt(self, state: State) -> None:
        if dict(state.published) != self.published:
            raise SystemExit("the saved state is of another configuration; name another directory")
        for module in (self.backbone, self.drafter):
            own = {name: state.parameters[name] for name in module.state_dict()}
            module.load_state_dict(own)
        if STAGES.index(state.progress.stage) > _stage_number(self.stage):
            raise SystemExit(
                f"the newest state is of stage {state.progress.stage}, which comes after {self.stage.name}"
            )
        if state.progress.stage == self.stage.name:
            self.progress = state.progress

    def _adopt_optimiser(self, state: State | None) -> bool:
        if state is None or state.optimiser is None or state.progress.stage != self.stage.name:
            return state is None
        self.optimiser.steps = state.optimiser["steps"]
        for kept, saved in (
            (self.optimiser.first, state.optimiser["first"]),
            (self.optimiser.second, state.optimiser["second"]),
        ):
            for name, tensor in kept.items():
                tensor.copy_(saved[name])
        return True

    def _trained(self) -> dict[str, Tensor]:
        """The parameters that this stage trains, by name; gradients of all others are off."""
        chosen: dict[str, Tensor] = {}
        for module in (self.backbone, self.drafter):
            for name, parameter in module.named_parameters():
                trained = {
                    "all": module is self.backbone,
                    "tables": name.endswith(".engram.embed.weight"),
                    "drafter": module is self.drafter,
                }[self.stage.trains]
                parameter.requires_grad_(trained)
                if trained:
                    chosen[name] = parameter
        return chosen

    def state(self, *, whole: bool) -> State:
        """What to save."""
        parameters = named_parameters_of(self.backbone) | named_parameters_of(self.drafter)
        optimiser = None
        if whole:
            optimiser = {
                "steps": self.optimiser.steps,
                "first": {name: value.cpu() for name, value in self.optimiser.first.items()},
                "second": {name: value.cpu() for name, value in self.optimiser.second.items()},
            }
        return State(self.progress, self.published, parameters, optimiser)

    def step(self, batch: DeviceBatch, phase: Phase) -> dict[str, Tensor]:
        """Learn from one batch; what is returned stays on the device."""
        numerics = Numerics(quantised=phase.quantised, exact=self.options.exact)
        if self.stage.trains == "drafter":
            losses, loads = self._draft_losses(batch, numerics)
            gates = [stage.ffn.gate for stage in self.drafter.stages]
        else:
            losses, loads = self._losses(batch, numerics, phase)
            gates = [block.ffn.gate for block in self.backbone.blocks]
        losses["loss"].backward()
        rate = self.stage.rate_at(self.progress.tokens, self.steps_here, fresh=self.fresh)
        norm = self.optimiser.step(rate, max_norm=self.options.max_norm)
        if self.stage.trains != "tables":
            steer_router(
                [(gate.bias, gate.bias_vl) for gate in gates], loads, _STEER_RATE * rate / self.stage.rate
            )
        self.steps_here += 1
        self.progress = replace(
            self.progress, step=self.progress.step + 1, tokens=self.progress.tokens + batch.num_tokens
        )
        text = torch.stack([load[0] for load in loads])
        crowding = (text.amax(-1) / text.mean(-1).clamp_min(1)).mean()
        return {name: value.detach() for name, value in losses.items()} | {"norm": norm, "crowding": crowding}

    def _begin(
        self, batch: DeviceBatch, numerics: Numerics, *, attend_all: bool = False, sample: bool = False
    ) -> Rows:
        sampled = None
        if sample:
            shape = (len(batch.token_ids), _SAMPLED)
            sampled = torch.randint(
                batch.token_ids.shape[1], shape, device=self.device, generator=self.generator
            )
        return self.backbone.begin(
            numerics,
            batch.doc_ids,
            batch.positions,
            batch.image_mask,
            sampled=sampled,
            attend_all=attend_all,
        )

    def _losses(
        self, batch: DeviceBatch, numerics: Numerics, phase: Phase
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        learns_all = self.stage.trains == "all"
        shared = self._begin(batch, numerics, attend_all=phase.attend_all, sample=learns_all)
        output = self.backbone(batch.token_ids, shared, batch.images)
        each = self.backbone.losses(output.hidden, batch.token_ids.roll(-1, 1).flatten())
        weight = batch.loss_weight.flatten()
        text = (each * weight).sum() / weight.sum().clamp_min(1)
        losses = {"text": text, "loss": text}
        if learns_all:
            losses["index"] = imitation_loss(shared)
            losses["balance"] = torch.stack(shared.balance).mean()
            losses["loss"] = text + _INDEX_WEIGHT * losses["index"] + _BALANCE_WEIGHT * losses["balance"]
        return losses, shared.loads

    def _draft_losses(self, batch: DeviceBatch, numerics: Numerics) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Blocks after tokens that the model itself would produce, against the target's distributions there."""
        with torch.no_grad():
            shared = self._begin(batch, numerics)
            output = self.backbone(batch.token_ids, shared, batch.images)
            likely = (batch.loss_weight > 0.5).float() + 1e-6
            picked = torch.multinomial(likely, _ANCHORS, replacement=True, generator=self.generator)
            # The anchor is the token that was just produced: the one after a position with loss.
            length = batch.token_ids.shape[1]
            picked = (picked + 1).clamp_max(length - 1)
            offset = torch.arange(len(picked), device=self.device)[:, None] * length
            anchors = Anchors.at((picked + offset).flatten(), batch.positions, batch.doc_ids, self.config)
            target = self.backbone.logits(output.hidden[anchors.block.flatten()])
            target = target.unflatten(0, anchors.block.shape)
        drafts = self.drafter(self.backbone, batch.token_ids, output.taps, anchors, shared)
        losses = draft_losses(drafts, target, anchors.alive)
        return losses, [torch.stack((load, torch.zeros_like(load))) for load in drafts.loads]

    @torch.no_grad()
    def evaluate(self, batch: DeviceBatch, tasks: list[str], phase: Phase) -> dict[str, float]:
        """Held-out loss of each task: rows of `batch` in order of `tasks`, the same number of each."""
        shared = self._begin(
            batch, Numerics(quantised=phase.quantised, exact=self.options.exact), attend_all=phase.attend_all
        )
        output = self.backbone(batch.token_ids, shared, batch.images)
        each = self.backbone.losses(output.hidden, batch.token_ids.roll(-1, 1).flatten())
        weight = batch.loss_weight
        each = (each.view(weight.shape) * weight).unflatten(0, (len(tasks), -1)).sum((1, 2))
        each = each / weight.unflatten(0, (len(tasks), -1)).sum((1, 2)).clamp_min(1)
        return dict(zip(tasks, each.tolist(), strict=True))


class Log:
    """One JSON object a line, in a file and on the screen."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, **values: object) -> None:
        """Append one line."""
        line = json.dumps(
            {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def train(options: Options) -> Trainer:
    """Train until the stage or the time is over; save; return the trainer."""
    deadline = time.monotonic() + options.minutes * 60 - min(_SAVE_RESERVE_S, options.minutes * 6)
    log = Log(options.out / "log.jsonl")
    trainer = Trainer(options)
    stage = trainer.stage
    log.write(
        event="begin",
        stage=stage.name,
        step=trainer.progress.step,
        tokens=trainer.progress.tokens,
        total=stage.tokens,
        parameters=sum(p.numel() for p in trainer.optimiser.parameters.values()),
        data_seed=trainer.data_seed,
        fresh=trainer.fresh,
        device=str(options.device),
    )
    held_out = _held_out(options, trainer)
    saved = time.monotonic()
    while trainer.progress.tokens < stage.tokens and time.monotonic() < deadline:
        phase = stage.phase_at(trainer.progress.tokens)
        log.write(event="phase", **asdict(phase))
        for metrics, tokens_per_s in _run_phase(trainer, phase, deadline):
            progress = trainer.progress
            rate = stage.rate_at(progress.tokens, trainer.steps_here, fresh=trainer.fresh)
            log.write(
                step=progress.step, tokens=progress.tokens, rate=rate, tokens_per_s=tokens_per_s, **metrics
            )
            if held_out is not None and progress.step % options.evaluate_every < options.log_every:
                tasks, batch = held_out
                losses = trainer.evaluate(batch, tasks, phase)
                log.write(event="held out", step=progress.step, **losses)
            if time.monotonic() - saved > options.save_every_s:
                save_whole(trainer.state(whole=True), options.scratch)
                saved = time.monotonic()
    save_whole(trainer.state(whole=True), options.scratch)
    size = save_compact(trainer.state(whole=False), options.out)
    log.write(event="saved", step=trainer.progress.step, tokens=trainer.progress.tokens, bytes=size)
    return trainer


def _run_phase(trainer: Trainer, phase: Phase, deadline: float) -> Iterator[tuple[dict[str, float], float]]:
    """Steps until the phase, the stage or the time is over; yields means of metrics and tokens/s every few steps."""
    options, stage = trainer.options, trainer.stage
    num_rows = max(options.batch_tokens // phase.seq_len, 1)
    feed = Feed(
        trainer.data_seed + trainer.progress.step,
        phase.seq_len,
        num_rows,
        _shares(stage.mixture),
        trainer.config.vision,
        trainer.device,
        num_workers=options.num_workers,
        repeat=options.repeat,
    )
    with feed:
        pending: list[dict[str, Tensor]] = []
        begin, tokens = time.monotonic(), 0
        for batch in feed:
            pending.append(trainer.step(batch, phase))
            tokens += batch.num_tokens
            over = (
                trainer.progress.tokens >= stage.tokens
                or stage.phase_at(trainer.progress.tokens) != phase
                or time.monotonic() > deadline
            )
            if len(pending) >= options.log_every or over:
                names = list(pending[0])
                table = torch.stack([torch.stack([step[name].float() for name in names]) for step in pending])
                means = dict(zip(names, table.nanmean(0).tolist(), strict=True))  # waits for the device
                means["bad_steps"] = float((~table.isfinite().all(1)).sum())
                yield means, tokens / (time.monotonic() - begin)
                pending, begin, tokens = [], time.monotonic(), 0
            if over:
                return


def _held_out(options: Options, trainer: Trainer) -> tuple[list[str], DeviceBatch] | None:
    """Rows of each task that training never sees; the names of tasks, and the rows in their order."""
    if not options.evaluate_every:
        return None
    mixture = _shares(options.stage.mixture)
    length = min(options.stage.phases[-1].seq_len, _HELD_OUT_TOKENS)
    tasks, taken = [], []
    for task in mixture:
        stream = rows(options.seed, length, {task: 1.0}, split="eval")
        try:
            taken += [next(stream) for _ in range(_HELD_OUT_ROWS)]
        except ValueError:
            continue  # practice facts exist for training alone
        tasks.append(task)
    batch = host_batch(collate(taken), trainer.config.vision, pin=False)
    return tasks, to_device(batch, trainer.device)


def _shares(mixture: str) -> Mapping[str, float]:
    """The shares of tasks of a mixture, given by its name or as JSON."""
    shares: Mapping[str, float] = MIXTURES[mixture] if mixture in MIXTURES else json.loads(mixture)
    return shares


def _stage_number(stage: Stage) -> int:
    return STAGES.index(stage.name)


def smoke_options(out: Path, minutes: float, *, stage: str = "base") -> Options:
    """A tiny model on one task, for a CPU: does it learn at all, and go on where it stopped?"""
    plan = replace(
        PLANS[stage],
        tokens=400_000,
        mixture='{"count": 1.0}',
        phases=(
            Phase(0.2, 128, quantised=False, attend_all=True),
            Phase(0.4, 256, quantised=False),
            Phase(1.0, 256),
        ),
        warmup=0.02,
    )
    return Options(
        stage=plan,
        out=out,
        scratch=out / "scratch",
        minutes=minutes,
        batch_tokens=1024,
        num_workers=0,
        seed=0,
        resume=(),
        device="cpu",
        sizes=SMOKE,
        log_every=5,
        evaluate_every=0,
    )


def parse(arguments: list[str] | None = None) -> tuple[Options, bool]:
    """Read the command line; also whether to compile."""
    parser = argparse.ArgumentParser(prog="python -m pocket.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="state and log; what a piece returns")
    parser.add_argument("--stage", choices=list(PLANS), default="base")
    parser.add_argument("--minutes", type=float, default=9.0, help="the piece ends before that")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], help="another directory with a state"
    )
    parser.add_argument("--scratch", type=Path, help="where the whole state stays")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever state there is")
    parser.add_argument("--tokens", type=int, help="tokens of the whole stage, over all pieces")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--mixture", help="a name, or shares of tasks as JSON")
    parser.add_argument("--batch-tokens", type=int, default=49_152)
    parser.add_argument("--workers", type=int, default=min(14, max((os.cpu_count() or 2) - 2, 0)))
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often each row is used, if rows come too slowly"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--exact", action="store_true", help="attention scores in float32, as the engine has them"
    )
    parser.add_argument("--compile", action="store_true", help="compile pointwise parts")
    parser.add_argument("--smoke", action="store_true", help="a minute on a CPU with a tiny model")
    given = parser.parse_args(arguments)
    if given.smoke:
        return smoke_options(given.out, min(given.minutes, 1.0), stage=given.stage), given.compile
    changes: dict[str, Any] = {
        name: value
        for name, value in (("tokens", given.tokens), ("rate", given.rate), ("mixture", given.mixture))
        if value is not None
    }
    options = Options(
        stage=replace(PLANS[given.stage], **changes),
        out=given.out,
        scratch=given.scratch or Path(tempfile.gettempdir()) / "pocket-scratch",
        fresh=given.fresh,
        exact=given.exact,
        minutes=given.minutes,
        batch_tokens=given.batch_tokens,
        num_workers=given.workers,
        seed=given.seed,
        resume=tuple(given.resume),
        device=given.device,
        repeat=given.repeat,
    )
    return options, given.compile


def main(arguments: list[str] | None = None) -> None:
    """Train one piece."""
    options, compiled = parse(arguments)
    # Products of bf16 values are exact in TF32.
    torch.set_float32_matmul_precision("high")
    if options.device != "cpu":
        torch.set_num_threads(2)  # the other cores make rows
    if compiled:
        fuse_pointwise()
    train(options)


if __name__ == "__main__":
    main()


__all__ = ["Options", "Trainer", "main", "parse", "smoke_options", "train"]
