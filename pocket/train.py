"""Trains Pocket, in pieces that resume: `python -m pocket.train --all --minutes 24 --piece 9.5 --out DIR`.

Owns the loop: which parameters learn from which losses, the clock, the log. A piece ends before its time is over and
leaves the compact state in DIR (and the whole one in --scratch); the same command again goes on from the newest of
both, to the end of the last stage, which leaves the finished checkpoint in parts. `pocket.export` reads either. The log
is DIR/log.jsonl, one object a line.

With `--gpus N` it is N processes, each with a GPU and rows of its own, that learn from the mean of their gradients.
Every decision follows from tokens and rank 0's clock, so all take the same; rank 0 alone evaluates, logs and saves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskfleet.model.config import ModelConfig
from deskfleet.testing.tiny_config import TinySizes
from pocket.batch import collate
from pocket.data.stream import MIXTURES, rows
from pocket.export import named_parameters_of, write_parts
from pocket.feed import DeviceBatch, Feed, host_batch, to_device
from pocket.model.draft import Anchors, Drafts, draft_lengths, draft_losses
from pocket.model.indexer import imitation_loss
from pocket.model.numerics import Numerics, fuse_pointwise, not_fused
from pocket.model.rows import Rows
from pocket.optimiser import Optimiser, steer_router
from pocket.ranks import ALONE, Ranks, Seat, joined, start
from pocket.restore import models, pocket_tokenizer
from pocket.sizes import POCKET, SMOKE, pocket_config
from pocket.stages import PLANS, Phase, Stage, timed
from pocket.state import STAGES, Progress, State, load_newest, save_compact, save_whole

_BALANCE_WEIGHT = 1e-3
_INDEX_WEIGHT = 0.3
_STEER_RATE = 1e-3
_SAMPLED = 64  # tokens of a row whose attention the indexers imitate
_ANCHORS = 128  # drafted blocks of a row
_LOST_STEPS = 10  # at the beginning of a phase, whose time is mostly compilation
_HELD_OUT_ROWS, _HELD_OUT_TOKENS = 2, 1024  # rows of each task, and their length
_COMPILING_S = 75.0  # with less than that left no phase is begun: its first steps would outlast the piece
_SAVE_RESERVE_S = 20.0
_RANK_SEED = 1_000_000_007  # more than the seeds of all pieces of a training are apart
_MAX_WORKERS = 6  # of one rank
_GIL_SWITCH_S = 1e-4  # the thread that makes batches must not hold up the one that starts kernels


@dataclass(frozen=True)
class Options:
    """One piece of training, which takes `minutes` at most. `batch_tokens` None is what the stage says.

    `evaluations` of held-out rows are made in a stage, and one at the end of every piece; 0 is none at all.
    """

    stage: Stage
    out: Path
    scratch: Path
    minutes: float
    batch_tokens: int | None
    num_workers: int
    seed: int
    resume: tuple[Path, ...]
    device: str
    repeat: int = 1
    fresh: bool = False
    exact: bool = False
    compiled: bool = False
    sizes: TinySizes = POCKET
    log_every: int = 20
    evaluations: int = 8
    save_every_s: float = 150.0
    max_norm: float = 1.0


class Trainer:
    """A model, its optimiser and how far they came; the same on every one of `ranks`."""

    def __init__(self, options: Options, ranks: Ranks = ALONE) -> None:
        self.options, self.stage, self.ranks = options, options.stage, ranks
        self.device = torch.device(options.device)
        self.published = pocket_config(pocket_tokenizer(), options.sizes)
        self.config = ModelConfig.from_dict(self.published)
        self.progress = Progress(self.stage.name, 0, 0)
        self.steps_here = 0
        ranks.wait()  # until rank 0 has saved the stage before
        state = None if options.fresh else load_newest([*options.resume, options.out, options.scratch])
        if state is not None:
            self._check(state)
        parameters = None if state is None else state.parameters
        backbone, drafter = models(self.published, parameters, seed=options.seed)
        self.backbone, self.drafter = backbone.to(self.device), drafter.to(self.device)
        self.optimiser = Optimiser(self._trained())
        self.fresh = not self._adopt_optimiser(state)
        ranks.agree({"step": self.progress.step, "tokens": self.progress.tokens, "fresh": self.fresh})
        self.become_rank_0()
        # Another piece must not see the same rows again, nor another rank.
        self.data_seed = options.seed + self.progress.step + 1_000_003 * _stage_number(self.stage)
        self.data_seed += _RANK_SEED * ranks.rank
        self.generator = torch.Generator(self.device).manual_seed(self.data_seed)

    @property
    def share(self) -> float:
        """How much of the stage is done."""
        progress = self.progress
        return self.stage.share(progress.tokens, progress.seconds_s, progress.lost_s)

    def _check(self, state: State) -> None:
        if dict(state.published) != self.published:
            raise SystemExit("the saved state is of another configuration; name another directory")
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

    def held(self) -> dict[str, Tensor]:
        """Every parameter and load bias by name, where it is."""
        held: dict[str, Tensor] = self.backbone.state_dict() | self.drafter.state_dict()
        return held

    def become_rank_0(self) -> None:
        """Take parameters and the optimiser's state from rank 0."""
        optimiser = self.optimiser
        self.ranks.spread([*self.held().values(), *optimiser.first.values(), *optimiser.second.values()])

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

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.stage.rate_at(self.share, self.steps_here, fresh=self.fresh)

    def spend(self, seconds_s: float, *, lost: bool) -> None:
        """Count time of this stage."""
        progress = self.progress
        spent_s = progress.seconds_s + (0.0 if lost else seconds_s)
        lost_s = progress.lost_s + (seconds_s if lost else 0.0)
        self.progress = replace(progress, seconds_s=spent_s, lost_s=lost_s)

    def step(self, batch: DeviceBatch, phase: Phase) -> dict[str, Tensor]:
        """Learn from one batch of each rank; what is returned stays on the device, and losses are this rank's."""
        losses, loads = self.learn(batch, phase)
        self.ranks.combine(self.optimiser.parameters, loads)
        norm = self.update(loads)
        tokens = self.progress.tokens + batch.num_tokens * self.ranks.world
        self.progress = replace(self.progress, step=self.progress.step + 1, tokens=tokens)
        text = torch.stack([load[0] for load in loads])
        crowding = (text.amax(-1) / text.mean(-1).clamp_min(1)).mean()
        return {name: value.detach() for name, value in losses.items()} | {"norm": norm, "crowding": crowding}

    def learn(self, batch: DeviceBatch, phase: Phase) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Leave gradients of one batch; return losses, and how many tokens chose each expert of each gate."""
        numerics = Numerics(quantised=phase.quantised, exact=self.options.exact)
        if self.stage.trains == "drafter":
            losses, loads = self._draft_losses(batch, numerics)
        else:
            losses, loads = self._losses(batch, numerics, phase)
        losses["loss"].backward()
        return losses, loads

    def update(self, loads: list[Tensor]) -> Tensor:
        """Take one step along the gradients, against the loads; return the norm of the gradients."""
        rate = self.rate
        norm = self.optimiser.step(rate, max_norm=self.options.max_norm)
        if self.stage.trains != "tables":
            owners = self.drafter.stages if self.stage.trains == "drafter" else self.backbone.blocks
            gates = [owner.ffn.gate for owner in owners]
            steer_router(
                [(gate.bias, gate.bias_vl) for gate in gates], loads, _STEER_RATE * rate / self.stage.rate
            )
        self.steps_here += 1
        return norm

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
        drafts, target, anchors = self._drafted(batch, numerics, self.generator)
        losses = draft_losses(drafts, target, anchors.alive)
        return losses, [torch.stack((load, torch.zeros_like(load))) for load in drafts.loads]

    def _drafted(
        self, batch: DeviceBatch, numerics: Numerics, generator: torch.Generator
    ) -> tuple[Drafts, Tensor, Anchors]:
        """Blocks after tokens that the model itself would produce, and the target's logits float32 [A, n, V] there."""
        with torch.no_grad():
            shared = self._begin(batch, numerics)
            output = self.backbone(batch.token_ids, shared, batch.images)
            likely = (batch.loss_weight > 0.5).float() + 1e-6
            picked = torch.multinomial(likely, _ANCHORS, replacement=True, generator=generator)
            # The anchor is the token that was just produced: the one after a position with loss.
            length = batch.token_ids.shape[1]
            picked = (picked + 1).clamp_max(length - 1)
            offset = torch.arange(len(picked), device=self.device)[:, None] * length
            anchors = Anchors.at((picked + offset).flatten(), batch.positions, batch.doc_ids, self.config)
            target = self.backbone.logits(output.hidden[anchors.block.flatten()])
            target = target.unflatten(0, anchors.block.shape)
        drafts = self.drafter(self.backbone, batch.token_ids, output.taps, anchors, shared)
        return drafts, target, anchors

    @torch.no_grad()
    def evaluate(
        self, batch: DeviceBatch, tasks: list[str], phase: Phase, *, quantised: bool
    ) -> dict[str, float]:
        """Held-out loss of each task: rows of `batch` in order of `tasks`, the same number of each."""
        shared = self._begin(
            batch, Numerics(quantised=quantised, exact=self.options.exact), attend_all=phase.attend_all
        )
        output = self.backbone(batch.token_ids, shared, batch.images)
        each = self.backbone.losses(output.hidden, batch.token_ids.roll(-1, 1).flatten())
        weight = batch.loss_weight
        each = (each.view(weight.shape) * weight).unflatten(0, (len(tasks), -1)).sum((1, 2))
        each = each / weight.unflatten(0, (len(tasks), -1)).sum((1, 2)).clamp_min(1)
        return dict(zip(tasks, each.tolist(), strict=True))

    @torch.no_grad()
    def accepted(self, batch: DeviceBatch, tasks: list[str]) -> dict[str, float]:
        """Mean number of drafts of a block that greedy decoding would accept, on held-out rows of each task."""
        generator = torch.Generator(self.device).manual_seed(self.options.seed)
        drafts, target, anchors = self._drafted(batch, Numerics(exact=self.options.exact), generator)
        lengths, whole = draft_lengths(drafts, target, anchors.alive)
        by_task = (lengths * whole).unflatten(0, (len(tasks), -1)).sum(1).float()
        return dict(zip(tasks, (by_task / whole.unflatten(0, (len(tasks), -1)).sum(1)).tolist(), strict=True))


class Log:
    """One JSON object a line, in a file and on the screen; nowhere without a path."""

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, **values: object) -> None:
        """Append one line."""
        if self._path is None:
            return
        line = json.dumps(
            {name: round(value, 5) if isinstance(value, float) else value for name, value in values.items()}
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def train(options: Options, ranks: Ranks = ALONE) -> Trainer:
    """Train until the stage or the time is over; save; return the trainer. Every rank calls it."""
    deadline = ranks.now_s() + options.minutes * 60 - min(_SAVE_RESERVE_S, options.minutes * 6)
    log = Log(options.out / "log.jsonl" if ranks.is_first else None)
    trainer = Trainer(options, ranks)
    stage = trainer.stage
    log.write(
        event="begin",
        stage=stage.name,
        step=trainer.progress.step,
        tokens=trainer.progress.tokens,
        total=stage.tokens if stage.minutes is None else None,
        minutes=stage.minutes,
        parameters=sum(p.numel() for p in trainer.optimiser.parameters.values()),
        data_seed=trainer.data_seed,
        fresh=trainer.fresh,
        device=str(options.device),
        gpus=ranks.world,
    )
    held_out = _held_out(options, trainer) if ranks.is_first else None
    next_evaluation, evaluated = math.floor(trainer.share * options.evaluations) + 1, -1
    saved = ranks.now_s()
    while trainer.share < 1 and ranks.now_s() < deadline - (_COMPILING_S if options.compiled else 0):
        phase = stage.phase_at(trainer.share)
        log.write(event="phase", **asdict(phase))
        for metrics, tokens_per_s in _run_phase(trainer, phase, deadline):
            progress = trainer.progress
            log.write(
                step=progress.step,
                tokens=progress.tokens,
                share=trainer.share,
                rate=trainer.rate,
                tokens_per_s=tokens_per_s,
                **metrics,
            )
            if held_out is not None and trainer.share * options.evaluations >= next_evaluation:
                _log_held_out(log, trainer, phase, *held_out)
                next_evaluation, evaluated = next_evaluation + 1, progress.step
            if ranks.now_s() - saved > options.save_every_s:
                _save_whole(trainer, log)
                saved = ranks.now_s()
    if held_out is not None and evaluated != trainer.progress.step:
        _log_held_out(log, trainer, stage.phase_at(trainer.share), *held_out)
    _save_whole(trainer, log)
    if ranks.is_first:
        if trainer.share >= 1 and stage.name == STAGES[-1]:
            size = sum(path.stat().st_size for path in write_parts(trainer.state(whole=False), options.out))
        else:
            size = save_compact(trainer.state(whole=False), options.out)
        log.write(event="saved", **asdict(trainer.progress), bytes=size)
    return trainer


def _save_whole(trainer: Trainer, log: Log) -> None:
    """Save what all ranks hold. Where that is not the same to the bit, the log says so and rank 0's goes on."""
    try:
        trainer.ranks.agree(trainer.held())
    except RuntimeError as error:
        log.write(event="ranks differ", error=str(error))
        trainer.become_rank_0()
    if trainer.ranks.is_first:
        save_whole(trainer.state(whole=True), trainer.options.scratch)


def train_all(options: Options, stages: Sequence[Stage], ranks: Ranks = ALONE) -> bool:
    """Train `stages` one after the other, from where the newest state is, until the time is over.

    Returns whether the last one is done. Every rank calls it.
    """
    deadline = ranks.now_s() + options.minutes * 60
    newest = None if options.fresh else load_newest([*options.resume, options.out, options.scratch])
    first = 0 if newest is None else STAGES.index(newest.progress.stage)
    for stage in stages:
        if STAGES.index(stage.name) < first:
            continue
        minutes = (deadline - ranks.now_s()) / 60
        if minutes * 60 < min(_SAVE_RESERVE_S, options.minutes * 6):
            return False
        trainer = train(replace(options, stage=stage, minutes=minutes), ranks)
        options = replace(options, fresh=False, resume=())
        if trainer.share < 1:
            return False
    return True


def _log_held_out(log: Log, trainer: Trainer, phase: Phase, tasks: list[str], batch: DeviceBatch) -> None:
    """Losses with and without quantisation, and of a drafter how far its drafts agree."""
    with not_fused():
        at = {"step": trainer.progress.step, "tokens": trainer.progress.tokens}
        for event, quantised in (("held out", True), ("held out, unquantised", False)):
            log.write(event=event, **at, **trainer.evaluate(batch, tasks, phase, quantised=quantised))
        if trainer.stage.trains == "drafter":
            log.write(event="accepted", **at, **trainer.accepted(batch, tasks))


def _run_phase(trainer: Trainer, phase: Phase, deadline: float) -> Iterator[tuple[dict[str, float], float]]:
    """Steps until the phase, the stage or the time is over; yields means of metrics and tokens/s every few steps."""
    options, stage, ranks = trainer.options, trainer.stage, trainer.ranks
    num_rows = max((options.batch_tokens or stage.batch_tokens) // phase.seq_len, 1)
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
        begin = counted = ranks.now_s()
        tokens = 0
        for number, batch in enumerate(feed):
            pending.append(trainer.step(batch, phase))
            tokens += batch.num_tokens * ranks.world
            lost = number < _LOST_STEPS and options.compiled
            if lost:
                pending[-1]["loss"].item()  # waits for the device
            now = ranks.now_s()
            trainer.spend(now - counted, lost=lost)
            counted = now
            over = trainer.share >= 1 or stage.phase_at(trainer.share) != phase or now > deadline
            if len(pending) >= options.log_every or over:
                names = list(pending[0])
                table = torch.stack([torch.stack([step[name].float() for name in names]) for step in pending])
                means = dict(zip(names, table.nanmean(0).tolist(), strict=True))  # waits for the device
                means["bad_steps"] = float((~table.isfinite().all(1)).sum())
                now = ranks.now_s()
                trainer.spend(now - counted, lost=False)
                yield means, tokens / (now - begin)
                pending, tokens = [], 0
                begin = counted = ranks.now_s()
                trainer.spend(counted - now, lost=True)  # evaluating and saving
            if over:
                return


def _held_out(options: Options, trainer: Trainer) -> tuple[list[str], DeviceBatch] | None:
    """Rows of each task that training never sees; the names of tasks, and the rows in their order."""
    if not options.evaluations:
        return None
    mixture = _shares(options.stage.mixture)
    length = min(options.stage.phases[-1].seq_len, _HELD_OUT_TOKENS)
    tasks, taken = [], []
    for task in mixture:
        stream = rows(options.seed, length, {task: 1.0}, split="eval")
        try:
            taken += [next(stream) for _ in range(_HELD_OUT_ROWS)]
        except ValueError:
            continue  # some tasks exist for training alone
        tasks.append(task)
    batch = host_batch(collate(taken), trainer.config.vision, pin=False)
    return tasks, to_device(batch, trainer.device)


def _shares(mixture: str) -> Mapping[str, float]:
    """The shares of tasks of a mixture, given by its name or as JSON."""
    shares: Mapping[str, float] = MIXTURES[mixture] if mixture in MIXTURES else json.loads(mixture)
    return shares


def _stage_number(stage: Stage) -> int:
    return STAGES.index(stage.name)


def smoke_stage(stage: Stage) -> Stage:
    """The stage on one task, in short rows."""
    return replace(
        stage,
        tokens=400_000,
        mixture='{"count": 1.0}',
        phases=(
            Phase(0.2, 128, quantised=False, attend_all=True),
            Phase(0.4, 256, quantised=False),
            Phase(1.0, 256),
        ),
        warmup=0.02,
    )


def smoke_options(out: Path, minutes: float, *, stage: str = "base") -> Options:
    """A tiny model on one task, for a CPU: does it learn at all, and go on where it stopped?"""
    return Options(
        stage=smoke_stage(PLANS[stage]),
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
        evaluations=0,
    )


@dataclass(frozen=True)
class Command:
    """One piece of training, the stages that are to be trained, and on how many GPUs.

    `seat` is the place of this process among those that the command started, None in the command itself.
    """

    options: Options
    stages: tuple[Stage, ...]
    gpus: int
    seat: Seat | None


def parse(arguments: Sequence[str]) -> Command:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pocket.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="state and log; what a piece returns")
    parser.add_argument("--stage", choices=list(PLANS), default="base")
    parser.add_argument("--all", action="store_true", help="every stage, one after the other")
    parser.add_argument("--minutes", type=float, help="of all pieces together; stages are as long as fits")
    parser.add_argument("--piece", type=float, default=9.5, help="minutes after which this piece has ended")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], help="another directory with a state"
    )
    parser.add_argument("--scratch", type=Path, help="where the whole state stays")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever state there is")
    parser.add_argument("--tokens", type=int, help="tokens of the stage, over all pieces, instead of minutes")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--mixture", help="a name, or shares of tasks as JSON")
    parser.add_argument("--batch-tokens", type=int, help="of one step [default: the stage's]")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="of this host, each with its own rows"
    )
    parser.add_argument("--seat", help=argparse.SUPPRESS)  # in each of the processes that --gpus starts
    parser.add_argument("--workers", type=int, help="processes that make rows, for each GPU")
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often each row is used, if rows come too slowly"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="with --gpus cuda, or cpu to try it without",
    )
    parser.add_argument(
        "--exact", action="store_true", help="attention scores in float32, as the engine has them"
    )
    parser.add_argument("--compile", action="store_true", help="compile pointwise parts")
    parser.add_argument("--smoke", action="store_true", help="a minute on a CPU with a tiny model")
    given = parser.parse_args(arguments)
    changes: dict[str, Any] = {
        name: value
        for name, value in (("tokens", given.tokens), ("rate", given.rate), ("mixture", given.mixture))
        if value is not None
    }
    if given.all and changes:
        parser.error("--tokens, --rate and --mixture are of one stage; leave out --all")
    if given.all and given.minutes is None:
        parser.error("--all needs --minutes")
    device = "cpu" if given.smoke else given.device
    if given.gpus < 1 or (given.gpus > 1 and device not in ("cuda", "cpu")):
        parser.error("--gpus takes the first N, with --device cuda or cpu")
    if device == "cuda" and given.gpus > torch.cuda.device_count():
        parser.error(f"--gpus {given.gpus}, and there are {torch.cuda.device_count()}")
    seat = None if given.seat is None else Seat.of(given.seat, given.gpus)
    if seat is not None and device == "cuda":
        device = f"cuda:{seat.rank}"
    workers = given.workers
    if workers is None:
        workers = min(_MAX_WORKERS, max((os.cpu_count() or 2) // given.gpus - 2, 0))
    if given.all:
        stages = timed(given.minutes)
    else:
        minutes = None if given.tokens is not None else given.minutes
        stages = (replace(PLANS[given.stage], minutes=minutes, **changes),)
    if given.smoke:
        stages = tuple(replace(smoke_stage(stage), **changes) for stage in stages)
        piece = min(given.piece, given.minutes or 1.0, 1.0)
        options = replace(smoke_options(given.out, piece), stage=stages[0])
        return Command(options, stages, given.gpus, seat)
    options = Options(
        stage=stages[0],
        out=given.out,
        scratch=given.scratch or Path(tempfile.gettempdir()) / "pocket-scratch",
        fresh=given.fresh,
        exact=given.exact,
        minutes=given.piece,
        batch_tokens=given.batch_tokens,
        num_workers=workers,
        seed=given.seed,
        resume=tuple(given.resume),
        device=device,
        repeat=given.repeat,
        compiled=given.compile,
    )
    return Command(options, stages, given.gpus, seat)


def main(arguments: list[str] | None = None) -> None:
    """Train one piece."""
    given = sys.argv[1:] if arguments is None else arguments
    command = parse(given)
    if command.seat is not None:
        with joined(command.seat, torch.device(command.options.device)) as ranks:
            _train_piece(command, ranks)
    elif command.gpus > 1:
        start(command.gpus, [sys.executable, "-m", "pocket.train", *given])
    else:
        _train_piece(command, ALONE)


def _train_piece(command: Command, ranks: Ranks) -> None:
    """Train in this process, as one of `ranks`."""
    options = command.options
    # Products of bf16 values are exact in TF32.
    torch.set_float32_matmul_precision("high")
    if options.device != "cpu":
        torch.set_num_threads(2)  # the other cores make rows
        sys.setswitchinterval(_GIL_SWITCH_S)
    elif ranks.world > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks.world, 1))
    if options.compiled:
        fuse_pointwise()
    is_done = train_all(options, command.stages, ranks)
    if ranks.is_first:
        print("done" if is_done else "to be continued: run the same command again", flush=True)


if __name__ == "__main__":
    main()


__all__ = [
    "Command",
    "Options",
    "Trainer",
    "main",
    "parse",
    "smoke_options",
    "smoke_stage",
    "train",
    "train_all",
]
