"""The training loop: it learns, it resumes where it stopped, each stage changes what it may and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from deskfleet.model.checkpoint import Checkpoint
from pocket.batch import collate
from pocket.data.stream import rows
from pocket.export import main as export_main
from pocket.export import write_parts
from pocket.feed import DeviceBatch, host_batch
from pocket.load import parameters_of
from pocket.model.draft import make_model
from pocket.optimiser import Optimiser, is_muon, orthogonalise, pace, steer_router
from pocket.ranks import ALONE, Ranks, Seat, joined, start
from pocket.stages import PLANS, Phase, timed
from pocket.state import (
    MAX_FILE_BYTES,
    STAGES,
    Progress,
    State,
    load_compact,
    load_newest,
    save_compact,
    save_whole,
)
from pocket.train import Options, Trainer, main, smoke_options, train
from tests.pocket.fixtures_model import config, token_map

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def options(out: Path, *, tokens: int, stage: str = "base") -> Options:
    given = smoke_options(out, 1.0, stage=stage)
    plan = replace(given.stage, tokens=tokens, phases=(Phase(0.3, 128, quantised=False), Phase(1.0, 128)))
    return replace(given, stage=plan, batch_tokens=512)


def log_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_and_resumes(tmp_path: Path) -> None:
    first = train(options(tmp_path, tokens=10_240))
    losses = [line["text"] for line in log_of(tmp_path) if "text" in line]
    assert losses[0] > 7.5  # near chance among 4,096
    assert losses[-1] < losses[0] - 1.0
    assert first.progress.step == 20

    longer = options(tmp_path, tokens=15_360)
    second = Trainer(longer)
    assert not second.fresh  # the whole state was there
    assert second.progress == first.progress
    assert second.data_seed != first.data_seed
    for name, value in first.backbone.state_dict().items():
        assert torch.equal(value, second.backbone.state_dict()[name]), name
    for name, value in first.optimiser.first.items():
        assert torch.equal(value, second.optimiser.first[name]), name

    (tmp_path / "scratch" / "whole.pt").unlink()
    third = train(longer)  # from the compact state alone
    assert third.fresh
    assert third.progress.step == 30
    resumed = [line["text"] for line in log_of(tmp_path) if "text" in line][-1]
    assert resumed < losses[-1] + 0.3


@pytest.mark.parametrize(("stage", "changed"), [("book", ".engram.embed.weight"), ("draft", "mtp.")])
def test_late_stages_change_only_their_own(tmp_path: Path, stage: str, changed: str) -> None:
    given = options(tmp_path, tokens=1_024, stage=stage)
    before = Trainer(given)
    old = {
        name: value.clone()
        for module in (before.backbone, before.drafter)
        for name, value in module.state_dict().items()
    }
    after = train(given)
    new = after.backbone.state_dict() | after.drafter.state_dict()
    different = {name for name, value in new.items() if not torch.equal(value, old[name])}
    assert different
    assert all(changed in name for name in different), different


@pytest.mark.slow
def test_drafts_learn(tmp_path: Path) -> None:
    train(options(tmp_path, tokens=12_800, stage="draft"))
    lines = [line for line in log_of(tmp_path) if "distance" in line]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05


def test_a_piece_ends_in_time(tmp_path: Path) -> None:
    given = replace(options(tmp_path, tokens=10**9), minutes=0.1)
    assert train(given).progress.step > 0
    assert load_compact(tmp_path) is not None


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    given = options(tmp_path, tokens=512)
    train(given)
    with pytest.raises(SystemExit, match="configuration"):
        Trainer(replace(given, sizes=replace(given.sizes, num_hidden_layers=6)))


def test_an_earlier_stage_does_not_start_from_a_later_one(tmp_path: Path) -> None:
    train(options(tmp_path, tokens=512, stage="draft"))
    with pytest.raises(SystemExit, match="draft"):
        Trainer(options(tmp_path, tokens=512, stage="base"))


def test_compact_state_loses_little_and_fits_small_files(tmp_path: Path) -> None:
    backbone, drafter = make_model(config(), token_map(), 3)
    parameters = backbone.state_dict() | drafter.state_dict()
    parameters |= {f"filler.{n}.experts.w1.weight": torch.randn(4, 512, 1024) for n in range(10)}
    state = State(Progress("draft", 7, 99, 1.5, 0.25), {"a": [1]}, parameters)
    total = save_compact(state, tmp_path)
    files = list(tmp_path.glob("weights-*.safetensors"))
    assert len(files) > 1
    assert all(path.stat().st_size <= MAX_FILE_BYTES + 2**16 for path in files)
    assert total < 1.3 * sum(p.numel() for p in parameters.values())
    loaded = load_compact(tmp_path)
    assert loaded is not None
    assert loaded.progress == state.progress
    assert set(loaded.parameters) == set(parameters)
    for name, value in parameters.items():
        limit = (
            value.abs().max() * (1 / 250 if ".experts.w" in name or ".engram.embed." in name else 1e-3) + 1e-7
        )
        assert (loaded.parameters[name] - value).abs().max() <= limit, name


def test_half_a_state_is_none(tmp_path: Path) -> None:
    parameters = {"a": torch.randn(64, 64)}
    save_compact(State(Progress("base", 1, 10), {}, parameters), tmp_path / "one")
    save_whole(State(Progress("base", 1, 5), {}, parameters, {"steps": 1}), tmp_path / "two")
    newest = load_newest([tmp_path / "one", tmp_path / "two"])
    assert newest is not None
    assert newest.progress.tokens == 10
    file = next((tmp_path / "one").glob("weights-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    newest = load_newest([tmp_path / "one", tmp_path / "two"])
    assert newest is not None
    assert newest.progress.tokens == 5


def test_learning_rate_rises_stays_falls_and_rises_after_a_fresh_resume() -> None:
    stage = PLANS["base"]
    at = [stage.rate_at(share, 1000, fresh=False) for share in (0, 0.005, 0.3, 0.8, 1.0)]
    assert at[0] == 0
    assert 0 < at[1] < at[2] == stage.rate > at[3] > at[4] == pytest.approx(stage.rate * stage.final)
    assert stage.rate_at(1 / 3, 0, fresh=True) < stage.rate / 10


def test_a_stage_lasts_for_its_tokens_or_for_its_minutes() -> None:
    by_tokens = PLANS["long"]
    assert by_tokens.share(by_tokens.tokens // 4, 1e9, 0) == pytest.approx(0.25)
    stages = timed(20)
    assert sum(stage.minutes or 0 for stage in stages) == pytest.approx(20)
    assert [stage.name for stage in stages] == list(STAGES)
    two = replace(by_tokens, minutes=2.0)
    assert two.share(10**12, 30, 0) == 0.25
    assert two.share(0, 30, 60) == 0.5  # what compilation took is no longer there for the rest
    assert two.share(0, 0, 200) == 1


def test_all_stages_in_one_command_and_again_after_an_interruption(tmp_path: Path) -> None:
    """The first piece is too short, the second goes on and ends, the third has nothing left to do."""
    arguments = ["--all", "--smoke", "--minutes", "0.2", "--out", str(tmp_path)]
    main([*arguments, "--piece", "0.09"])
    first = log_of(tmp_path)
    assert [line["stage"] for line in first if line.get("event") == "begin"] == ["base"]
    stopped_at = first[-1]["step"]
    assert stopped_at
    main([*arguments, "--piece", "1.0"])
    second = log_of(tmp_path)[len(first) :]
    begins = [(line["stage"], line["step"]) for line in second if line.get("event") == "begin"]
    assert begins == [("base", stopped_at), ("long", 0), ("book", 0), ("draft", 0)]
    assert [line["share"] for line in second if "share" in line][-1] == 1.0
    assert second[-1]["stage"] == "draft"
    export_main(tmp_path, tmp_path / "checkpoint")
    assert Checkpoint.open(tmp_path / "checkpoint").config.num_hidden_layers == 8
    assert all(line["lost_s"] + line["seconds_s"] < 30 for line in second if line.get("event") == "saved")
    main([*arguments, "--piece", "1.0"])
    assert not any("share" in line for line in log_of(tmp_path)[len(first) + len(second) :])


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Where no more may travel than the checkpoint itself: it says how far it came, and loses what rounding loses."""
    given = options(tmp_path / "first", tokens=512)
    train(given)
    export_main(tmp_path / "first", tmp_path / "checkpoint")
    again = Trainer(
        replace(given, out=tmp_path / "second", scratch=tmp_path / "none", resume=(tmp_path / "checkpoint",))
    )
    assert again.progress.step == 1
    assert again.fresh
    kept = parameters_of(Checkpoint.open(tmp_path / "checkpoint"))
    state = again.state(whole=False)
    assert set(state.parameters) == set(kept)
    for name, value in kept.items():
        assert torch.equal(value, state.parameters[name]), name
    write_parts(state, tmp_path / "parts")
    export_main(tmp_path / "parts", tmp_path / "twice")
    # A group may take a smaller scale the second time; its values are the same.
    for name, value in parameters_of(Checkpoint.open(tmp_path / "twice")).items():
        assert torch.equal(value, kept[name]), name
    part = tmp_path / "parts" / "checkpoint.tar.0"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="not all there"):
        export_main(tmp_path / "parts", tmp_path / "thrice")


def test_a_drafter_that_was_not_trained_does_not_travel(tmp_path: Path) -> None:
    given = options(tmp_path, tokens=512)
    before = train(given)
    compact = load_compact(tmp_path)
    assert compact is not None
    assert not any(name.startswith("mtp.") for name in compact.parameters)
    (tmp_path / "scratch" / "whole.pt").unlink()
    after = Trainer(given)
    for name, value in before.drafter.state_dict().items():
        assert torch.equal(value, after.drafter.state_dict()[name]), name


def test_every_parameter_has_one_rule() -> None:
    backbone, drafter = make_model(config(), token_map(), 0)
    names = [name for module in (backbone, drafter) for name, _ in module.named_parameters()]
    muon = {name for name in names if is_muon(name)}
    for part in (
        "attn.wq_a",
        "attn.wo_b",
        "experts.w1",
        "shared_experts.w2",
        "engram.wkv",
        "main_proj",
        "mlp.w1",
    ):
        assert any(part in name for name in muon), part
    for part in ("embed", "norm", "ffn.gate", "hc_", "sink", "indexer", "bias", "head.weight", "image_start"):
        assert not any(part in name for name in muon), part
    assert pace("layers.1.engram.embed.weight") == (2.0, 0.0)
    assert pace("layers.1.attn.wq_a.weight")[1] > 0


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 64)))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_the_optimiser_descends_and_survives_a_bad_gradient() -> None:
    target = torch.randn(32, 16)
    parameters = {"x.attn.wq_a.weight": torch.zeros(32, 16), "x.norm.weight": torch.zeros(16)}
    for value in parameters.values():
        value.requires_grad_()
    optimiser = Optimiser(parameters)
    for step in range(200):
        loss = (parameters["x.attn.wq_a.weight"] - target).square().mean()
        loss = loss + (parameters["x.norm.weight"] - 1).square().mean()
        if step == 100:
            loss = loss * torch.nan
        loss.backward()
        optimiser.step(0.1 * (1 - step / 200))
    assert all(value.isfinite().all() for value in parameters.values())
    assert loss < 0.1


def test_router_biases_move_against_the_load() -> None:
    bias, bias_vl = torch.zeros(3), torch.zeros(3)
    steer_router([(bias, bias_vl)], [torch.tensor([[5.0, 1.0, 3.0], [0.0, 0.0, 0.0]])], 0.1)
    assert torch.allclose(bias, torch.tensor([-0.1, 0.1, 0.0]))
    assert torch.equal(bias_vl, torch.zeros(3))


def ready(out: Path, ranks: Ranks) -> Trainer:
    """In the middle of a stage, where the learning rate is not zero."""
    trainer = Trainer(options(out, tokens=10_240), ranks)
    trainer.progress = replace(trainer.progress, tokens=5_120)
    return trainer


def half(trainer: Trainer, rank: int) -> DeviceBatch:
    """Rank 0 has text alone, so that its vision tower has no gradient."""
    stream = rows(3, 256, {("count", "vision drill")[rank]: 1.0})
    trainer.generator.manual_seed(rank)
    return host_batch(collate(list(islice(stream, 1))), trainer.config.vision, pin=False)


def step_of_one_rank() -> None:
    """What each process of the test below does: DIRECTORY --seat SEAT."""
    directory, _, seat = sys.argv[1:]
    torch.set_num_threads(1)
    with joined(Seat.of(seat, 2), torch.device("cpu")) as ranks:
        trainer = ready(Path(directory), ranks)
        trainer.step(half(trainer, ranks.rank), Phase(1.0, 256))
        trainer.ranks.agree(trainer.held())
        torch.save(trainer.held(), Path(directory) / f"rank-{ranks.rank}.pt")
        with torch.no_grad():
            trainer.held()["norm.weight"][0] += 1e-6 * ranks.rank
        with pytest.raises(RuntimeError, match=r"0 and 1 disagree on 1 of .* first on norm\.weight"):
            trainer.ranks.agree(trainer.held())


def test_two_ranks_learn_what_one_learns_from_the_mean_of_their_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = "from tests.pocket.test_train import step_of_one_rank; step_of_one_rank()"
    start(2, [sys.executable, "-c", program, str(tmp_path)])
    one, phase = ready(tmp_path, ALONE), Phase(1.0, 256)
    before = {name: value.clone() for name, value in one.held().items()}
    parameters = one.optimiser.parameters
    _, loads = one.learn(half(one, 0), phase)
    missing = {name for name, value in parameters.items() if value.grad is None}
    _, more = one.learn(half(one, 1), phase)
    appeared = {name for name in missing if parameters[name].grad is not None}
    assert any(name.startswith("vision.") for name in appeared)
    for value in parameters.values():
        if value.grad is not None:
            value.grad /= 2
    one.update([a + b for a, b in zip(loads, more, strict=True)])
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
    for name, value in one.held().items():
        assert torch.equal(found[0][name], found[1][name]), name
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-6, msg=name)
    changed = {name for name, value in before.items() if not torch.equal(found[0][name], value)}
    assert appeared <= changed
    assert any(name.endswith(".gate.bias") for name in changed)


def command(out: Path, arguments: Sequence[str]) -> list[str]:
    fixed = ["--smoke", "--gpus", "2", "--device", "cpu", "--out", str(out)]
    return [sys.executable, "-m", "pocket.train", *fixed, *arguments]


def test_two_ranks_stop_go_on_and_finish(tmp_path: Path) -> None:
    """Were parameters not the same on both at every save, the command would fail."""

    def piece(said: str, *arguments: str) -> dict[str, Any]:
        ended = subprocess.run(
            command(tmp_path, arguments), cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1].startswith(said)
        assert ended.stdout.count('"begin"') == ended.stdout.count(said) == 1
        saved: dict[str, Any] = log_of(tmp_path)[-1]
        return saved

    first = piece("to be continued", "--piece", "0.08")
    assert first["tokens"] == 2 * 1024 * first["step"] > 0
    last = piece("done", "--tokens", str(first["tokens"] + 2048))
    assert last["step"] == first["step"] + 1
    begins = [line for line in log_of(tmp_path) if line.get("event") == "begin"]
    assert [(line["gpus"], line["step"], line["fresh"]) for line in begins] == [
        (2, 0, False),
        (2, first["step"], False),
    ]
    export_main(tmp_path, tmp_path / "checkpoint")
    assert Checkpoint.open(tmp_path / "checkpoint").config.num_hidden_layers == 8


@pytest.mark.slow
def test_two_ranks_train_every_stage(tmp_path: Path) -> None:
    arguments = command(tmp_path, ["--all", "--minutes", "0.2"])
    for _ in range(6):
        ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        if ended.stdout.endswith("\ndone\n"):
            break
    begins = [line["stage"] for line in log_of(tmp_path) if line.get("event") == "begin"]
    assert begins == sorted(begins, key=STAGES.index)
    assert set(begins) == set(STAGES)
    export_main(tmp_path, tmp_path / "checkpoint")
    assert Checkpoint.open(tmp_path / "checkpoint").config.num_hidden_layers == 8


@pytest.mark.parametrize("victim", ["rank", pytest.param("command", marks=pytest.mark.slow)])
def test_when_one_process_dies_all_end(tmp_path: Path, victim: str) -> None:
    arguments = command(tmp_path, ["--stage", "book", "--minutes", "1"])
    with subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any('"phase"' in line for line in process.stdout)  # both train
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        (ranks[1] if victim == "rank" else process).send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        process.wait(20)
        gone, left = psutil.wait_procs(ranks, timeout=20)
        assert len(gone) == 2, left
        assert time.monotonic() - killed_at < 20
        if victim == "rank":
            assert process.returncode == 1
            assert "rank 1 was ended by SIGKILL" in process.stderr.read()
