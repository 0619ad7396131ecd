"""Profiles: what each is best at, what wishes they refuse, and the files that are in the repository."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import parse_nodes
from deskfleet.planner.plan import MemoryPlan, make_plan
from deskfleet.planner.profiles import PROFILES, ProfileName, profile_search, profile_toml
from deskfleet.planner.published import published_inventory
from deskfleet.planner.search import search
from deskfleet.planner.speed import speed_of
from deskfleet.planner.wishes import ServingLayout, Wishes

MODEL = published_inventory("v4.1-flash")
FILES = Path(__file__).parents[2] / "profiles"
NODES = ("3xspark", "4xspark")


@cache
def plan_of(name: ProfileName, nodes: str) -> MemoryPlan:
    return profile_search(name, MODEL, parse_nodes(nodes), Wishes()).best


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", PROFILES)
def test_a_file_of_the_repository_is_what_the_planner_writes_today(name: ProfileName, nodes: str) -> None:
    file = FILES / f"v4.1-flash-{nodes}-{name}.toml"
    command = (
        f"deskfleet plan --nodes {nodes} --profile {name} --write-profile {file.relative_to(FILES.parent)}"
    )
    assert file.read_text(encoding="utf-8") == profile_toml(name, plan_of(name, nodes)), f"run {command}"


def test_every_file_is_written_by_a_profile() -> None:
    named = {f"v4.1-flash-{nodes}-{name}.toml" for nodes in NODES for name in PROFILES}
    assert {path.name for path in FILES.iterdir()} == named


@pytest.mark.parametrize("name", PROFILES)
def test_a_file_leaves_nothing_open(name: ProfileName) -> None:
    plan = plan_of(name, "3xspark")
    values: dict[str, Any] = tomllib.loads(profile_toml(name, plan))["profile"]
    missing = {field.name for field in fields(ServingLayout)} - set(values)
    assert missing == {"fraction"}  # none was given: the pool is given in bytes
    assert ServingLayout(**values, fraction=None) == plan.layout


def test_one_request_more_fits_nowhere() -> None:
    plan = plan_of("max-concurrency", "3xspark")
    context, count = plan.layout.max_model_len, plan.layout.max_num_seqs
    assert plan.fits
    assert plan.layout.kv_tokens == count * context
    more = replace(
        Wishes(), max_model_len=context, max_num_seqs=count + 1, kv_tokens=(count + 1) * context, tp_size=3
    )
    assert not search(MODEL, parse_nodes("3xspark"), more, num_changes=0).best.fits


def test_a_longer_context_fits_nowhere() -> None:
    plan = plan_of("max-context", "3xspark")
    assert plan.layout.max_model_len < MODEL.max_position_embeddings
    more = Wishes(max_model_len=plan.layout.max_model_len + 1024, max_num_seqs=1, tp_size=3)
    assert not search(MODEL, parse_nodes("3xspark"), more, num_changes=0).best.fits


def test_no_split_steps_faster() -> None:
    best = plan_of("lowest-latency", "4xspark")

    def step_s(plan: MemoryPlan) -> float:
        return speed_of(plan.inventory, plan.layout, plan.cluster.kind, batches=(1,)).decode[0].step_s

    for engine in ("vllm", "sglang"):
        for tp_size, ep_size in ((4, 1), (4, 2), (4, 4)):
            wishes = replace(best.wishes, ep_size=ep_size)
            plan = make_plan(MODEL, best.cluster, wishes, engine=engine, tp_size=tp_size)
            assert step_s(plan) >= step_s(best)


@pytest.mark.parametrize(
    ("name", "wishes", "message"),
    [
        ("max-context", Wishes(max_model_len=1024), "max-context finds the context"),
        ("max-context", Wishes(kv_tokens=1024), "max-context finds the context"),
        ("max-concurrency", Wishes(kv_tokens=1024), "max-concurrency finds the pool"),
    ],
)
def test_a_wish_that_the_profile_decides_is_refused(name: ProfileName, wishes: Wishes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_search(name, MODEL, parse_nodes("3xspark"), wishes)


def test_a_wished_context_stays_and_what_does_not_fit_has_ways_out() -> None:
    found = profile_search("lowest-latency", MODEL, parse_nodes("3xspark"), Wishes(max_model_len=8192))
    assert found.best.layout.max_model_len == 8192
    found = profile_search("lowest-latency", MODEL, parse_nodes("2xspark"), Wishes(tp_size=2))
    assert not found.best.fits
    assert "--nodes 3xspark, without --tp" in {change.flags for change in found.changes}
