"""Images on nodes: what is pulled, copied, built or left alone; and real ones, on a fleet with Docker Engines."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bed import Bed, EngineImage, NodeSetup, bed
from bed.node import ENGINE_FLAGS

from deskfleet.cli import main
from deskfleet.errors import ConfigError, DeskfleetError
from deskfleet.fleet.build import (
    ADAPTER_LABEL,
    SAVE,
    Asked,
    Build,
    Image,
    Wheel,
    check_buildable,
    copy_words,
    first_step,
    read_wheels,
    recipe,
    same_image,
    shown_commands,
    worker_steps,
)
from deskfleet.fleet.remote import Remotes
from deskfleet.fleet.spec import EngineSpec, FleetSpec, read_spec

FLEET = """\
name = "desk"
[paths]
checkpoint = "/srv/checkpoint"
cache = "/srv/cache"
[[nodes]]
name = "node0"
kind = "local"
address = "node0"
[[nodes]]
name = "node1"
kind = "local"
address = "node1"
[[nodes]]
name = "node2"
kind = "local"
address = "node2"
[checkpoint]
model = "v4.1-flash"
[engine]
name = "vllm"
image = "example/vllm@sha256:{digest}"
"""
DIGEST = "example/vllm@sha256:" + "a" * 64
ID = "sha256:" + "b" * 64
ONE = Image(ID, (DIGEST,), ("sha256:1", "sha256:2"), "arm64", 1000, {}, {"PATH": "/bin"})
OTHER = replace(ONE, layers=("sha256:1", "sha256:3"))


@pytest.fixture
def spec(tmp_path: Path) -> FleetSpec:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(digest="a" * 64))
    return read_spec(path)


def engine(spec: FleetSpec, **values: Any) -> FleetSpec:
    changed: EngineSpec = replace(spec.engine, **values)
    return replace(spec, engine=changed)


def done(
    spec: FleetSpec, images: list[Image | None], *, from_head: bool = False, new: bool = False
) -> list[str]:
    """What each node gets, as one word, given what each has."""
    asked = {node.name: Asked(image, 0) for node, image in zip(spec.nodes, images, strict=True)}
    first = first_step(spec, asked, is_asked_to_build=new)
    truth = next((image for image in images if image is not None), ONE)
    return [
        step.doing if step.source is None else f"from {step.source}"
        for step in (first, *worker_steps(spec, asked, truth, from_head=from_head))
    ]


def test_what_each_node_gets(spec: FleetSpec) -> None:
    assert done(spec, [ONE, ONE, ONE]) == ["kept"] * 3
    # docker's id differs between ways of storing an image.
    assert done(spec, [ONE, replace(ONE, id="sha256:c", digests=()), ONE]) == ["kept"] * 3
    assert done(spec, [None, ONE, None]) == ["pulled", "kept", "pulled"]
    assert done(spec, [ONE, None, ONE], from_head=True) == ["kept", "from node0", "kept"]
    by_id = engine(spec, image=ID)
    assert done(by_id, [ONE, None, ONE]) == ["kept", "from node0", "kept"]
    assert done(by_id, [None, None, ONE]) == ["from node2", "from node0", "kept"]
    with pytest.raises(DeskfleetError, match="no node has the image sha256:bbb"):
        done(by_id, [None, None, None])
    tag = engine(spec, image="example/vllm:v1", allow_tag=True)
    assert done(tag, [ONE, OTHER, None]) == ["kept", "from node0", "from node0"]
    assert done(tag, [None, None, None]) == ["pulled", "from node0", "from node0"]
    built = engine(spec, image="desk/vllm", build=True)
    assert done(built, [None, None, None]) == ["built", "from node0", "from node0"]
    assert done(built, [ONE, ONE, OTHER]) == ["kept", "kept", "from node0"]
    assert done(built, [ONE, ONE, ONE], new=True)[0] == "built"


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": {ADAPTER_LABEL: "2"}},
        {"layers": ("sha256:1",)},
        {"arch": "amd64"},
        {"env": {"PATH": "/other"}},
    ],
)
def test_what_makes_an_image_another(changed: Mapping[str, Any]) -> None:
    assert not same_image(ONE, replace(ONE, **changed))


def test_what_is_refused(spec: FleetSpec) -> None:
    assert check_buildable(spec) == DIGEST
    with pytest.raises(ConfigError, match=r"engine\.image is missing"):
        check_buildable(engine(spec, image=None))
    with pytest.raises(ConfigError, match="a tag, which may be another image tomorrow"):
        check_buildable(engine(spec, image="example/vllm:latest"))
    for values in ({"name": "native"}, {"name": "exl3"}, {"adapter": False}):
        with pytest.raises(ConfigError, match="only the adapters of vllm and sglang"):
            check_buildable(engine(spec, image="desk/vllm", build=True, **values))


def wheel(directory: Path, name: str, *, tags: str = "py3-none-any", version: str = "0.1.0") -> Path:
    """A distribution of one module that says its version, with an entry point as vLLM's plug-ins have."""
    path = directory / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/entry_points.txt", f"[vllm.general_plugins]\n{name} = {name}:VERSION\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_recipe(spec: FleetSpec, tmp_path: Path) -> None:
    """What the base has already stays: capabilities and path are added to."""
    wheels = (wheel(tmp_path, "deskfleet_vllm"), wheel(tmp_path, "deskfleet_engram", version="0.2.0"))
    assert [path.exists() for path in wheels] == [True, True]
    read = read_wheels(tmp_path)
    base = replace(
        ONE, labels={"deskfleet.provides": "head-padding"}, env={"PYTHONPATH": '/with "quotes"/$HOME'}
    )
    made = recipe(spec, DIGEST, base, read)
    assert made.dockerfile.splitlines() == [
        f"ARG base={DIGEST}",
        "FROM ${base}",
        "COPY site /opt/deskfleet/site",
        'ENV PYTHONPATH="/opt/deskfleet/site:/with \\"quotes\\"/\\$HOME"',
        'LABEL deskfleet.provides="adapter,head-padding"',
        'LABEL deskfleet.adapter="0.1.0"',
        f'LABEL deskfleet.base="{DIGEST}"',
    ]
    # No directory of whoever starts it gets onto the path.
    assert 'PYTHONPATH="/opt/deskfleet/site"' in recipe(spec, DIGEST, ONE, read).dockerfile
    with pytest.raises(ConfigError, match="the wheels are deskfleet_engram; one each is needed of"):
        recipe(spec, DIGEST, ONE, read[:1])
    foreign = [
        replace(each, tags="py3-none-manylinux_2_28_x86_64") if each.name == "deskfleet_engram" else each
        for each in read
    ]
    with pytest.raises(ConfigError, match=r"is for manylinux_2_28_x86_64, and .* is for arm64"):
        recipe(spec, DIGEST, ONE, foreign)
    fitting = [replace(each, tags="py3-none-manylinux_2_28_aarch64") for each in read]
    assert all(isinstance(each, Wheel) for each in recipe(spec, DIGEST, ONE, fitting).wheels)
    (tmp_path / "broken-1-py3-none-any.whl").write_text("no archive")
    with pytest.raises(ConfigError, match="is no wheel"):
        read_wheels(tmp_path)


async def test_dry_run_names_what_could_run(spec: FleetSpec) -> None:
    async with Remotes(spec.nodes) as remotes:
        shown = shown_commands(spec, remotes, Build(from_head=True))
        writes, reads = copy_words(remotes["node0"], remotes["node2"], "a b", "arm64")
    assert "pull" in shown["node0"]
    assert shown["node1"]["copy"][1][-1] == "exec docker load --quiet"
    assert (writes[-1], reads[-2]) == ("exec bash -c '" + SAVE + "' 'a b' arm64", "node2")


def test_dry_run_of_the_command(
    spec: FleetSpec, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["fleet", "build", "-f", str(spec.path), "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert out.count("docker image inspect") == 3
    assert out.count("docker pull --quiet") == 3


# --- real ones ------------------------------------------------------------------------------------

OTHER_IMAGE = EngineImage(variant="other")
DOCKER = shutil.which("docker")


@pytest.fixture(scope="module")
def uneven() -> Iterator[Bed]:
    """The head has the image, the first worker none, the second another one of the same name."""
    setups = [NodeSetup(), NodeSetup(images=()), NodeSetup(images=(OTHER_IMAGE,))]
    with bed(3, setups=setups) as made:
        yield made


def typed(made: Bed, *words: str, **values: Any) -> tuple[int, str, str]:
    """`deskfleet fleet build` on the desk: exit code, stdout and stderr."""
    made.desk.write("/root/fleet.toml", made.fleet_toml(checkpoint={"model": "pocket"}, **values))
    ran = made.desk.run(
        ["deskfleet", "fleet", "build", "--file", "/root/fleet.toml", *words], check=False, timeout_s=120
    )
    return ran.returncode, ran.stdout, ran.stderr


def ids(made: Bed, reference: str) -> list[str]:
    shown = [
        node.docker("image", "inspect", "--format", "{{.Id}}", reference, check=False) for node in made.nodes
    ]
    return [each.stdout.strip() if each.returncode == 0 else "" for each in shown]


@pytest.mark.fleet
def test_an_image_reaches_every_node(uneven: Bed) -> None:
    """First it is interrupted in the middle, and nothing stays; then it comes, and after that nothing is done."""
    image = EngineImage()
    worker = uneven.nodes[1]
    assert ids(uneven, image.id) == [image.id, "", ""]
    uneven.desk.write("/root/fleet.toml", uneven.fleet_toml(checkpoint={"model": "pocket"}))
    # The head hangs while it writes, with half of the archive on its way.
    slow = f'#!/bin/sh\n[ "$1 $2" = "save --" ] || exec {DOCKER} "$@"\n{DOCKER} "$@" | head -c 5000\nsleep 1000\n'
    uneven.head.shim("docker", slow)
    process = uneven.desk.start(["deskfleet", "fleet", "build", "--file", "/root/fleet.toml"])
    deadline = time.monotonic() + 60
    while not any("docker load" in words for words in worker.processes().values()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    uneven.desk.signal("fleet build", "INT")
    assert process.wait(30) == 130
    uneven.head.shim("docker", f'#!/bin/sh\nexec {DOCKER} "$@"\n')
    assert ids(uneven, image.id) == [image.id, "", ""]
    # What hangs is ended there as soon as its connection is seen to be gone.
    time.sleep(1.0)
    for node in uneven.nodes:
        left = [
            words for words in node.processes().values() if "docker load" in words or "docker save" in words
        ]
        assert not left
    assert worker.docker("images", "--all", "--quiet").stdout == ""

    code, out, err = typed(uneven, "--json")
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert [each["doing"] for each in told] == ["kept", "copied", "copied"]
    assert ids(uneven, image.id) == [image.id] * 3
    code, out, err = typed(uneven)
    assert (code, [line.split()[1] for line in out.splitlines()]) == (0, ["kept:"] * 3), err


@pytest.mark.fleet
def test_another_image_of_the_same_name_is_seen(uneven: Bed) -> None:
    tag = EngineImage().tag
    uneven.nodes[2].docker("tag", OTHER_IMAGE.id, tag)
    values = {"engine": {"name": "native", "image": tag, "allow_tag": True}}
    assert len(set(ids(uneven, tag))) > 1
    code, out, err = typed(uneven, "--json", **values)
    assert code == 0, err
    doing = [json.loads(line)["doing"] for line in out.splitlines()]
    assert (doing[0], doing[2]) == ("kept", "copied")
    assert set(ids(uneven, tag)) == {EngineImage().id}
    del values["engine"]["allow_tag"]
    assert typed(uneven, **values)[0] == 2


@pytest.mark.fleet
def test_an_adapter_is_built_in(uneven: Bed) -> None:
    """Over the bed's image: Python in a container on a worker finds the plug-in, and it is written down how."""
    for name in ("deskfleet_vllm", "deskfleet_engram"):
        path = wheel(uneven.head.hub.directory, name)
        uneven.desk.copy_in(path, f"/root/wheels/{path.name}")
    values: dict[str, Any] = {"engine": {"name": "vllm", "image": "desk/vllm:built", "build": True}}
    code, _, err = typed(uneven, "--base", EngineImage().id, **values)
    assert (code, "the wheels are none" in err) == (2, True)
    words = ("--base", EngineImage().id, "--wheels", "/root/wheels")
    code, out, err = typed(uneven, *words, "--json", **values)
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert [each["doing"] for each in told] == ["built", "copied", "copied"]
    assert {each["adapter"] for each in told} == {"0.1.0"}
    assert len({each["id"] for each in told}) == 1
    script = "import importlib.metadata as m; print(m.version('deskfleet-vllm'), *(e.load() for e in m.entry_points("
    script += "group='vllm.general_plugins', name='deskfleet_vllm')))"
    said = uneven.nodes[2].docker("run", "--rm", *ENGINE_FLAGS, "desk/vllm:built", "python", "-c", script)
    assert said.stdout.strip() == "0.1.0 0.1.0"
    kept = json.loads(uneven.desk.path("/root/.local/state/deskfleet/bed/image.json").read_text())
    assert (kept["base"], kept["id"]) == (EngineImage().id, told[0]["id"])
    assert [each["name"] for each in kept["wheels"]] == ["deskfleet_engram", "deskfleet_vllm"]
    # Nothing is left of the making, and what is built is kept.
    assert uneven.head.run("ls /srv/cache").stdout == ""
    assert "deskfleet-build" not in uneven.head.docker("images").stdout
    code, out, err = typed(uneven, "--json", **values)
    assert [json.loads(line)["doing"] for line in out.splitlines()] == ["kept"] * 3, err


@pytest.mark.fleet
def test_no_room_for_an_image(uneven: Bed) -> None:
    """Room is compared before a byte is sent."""
    worker = uneven.nodes[1]
    worker.docker("rmi", "desk/vllm:built", check=False)  # an image remains while another is over it
    worker.docker("rmi", "--force", EngineImage().id)
    worker.run(
        "mkdir -p /tiny && mount -t tmpfs -o size=8k tmpfs /tiny && head -c 8192 /dev/zero >/tiny/full"
    )
    worker.shim("docker", f'#!/bin/sh\n[ "$1" = info ] && {{ echo /tiny; exit; }}\nexec {DOCKER} "$@"\n')
    code, _, err = typed(uneven)
    assert code == 1
    assert "node1: docker has 0 B of room, and loading the image takes up to" in err
    assert ids(uneven, EngineImage().id)[1] == ""
    worker.shim("docker", f'#!/bin/sh\nexec {DOCKER} "$@"\n')
    assert typed(uneven)[0] == 0
