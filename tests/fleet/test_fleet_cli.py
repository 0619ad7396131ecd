"""`deskfleet fleet init`, `config show`, `plan` and `export`, as they are typed."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_sshd import SSHD, WHY_NOT, Sshd, ssh_wrapper

from deskfleet.cli import main
from deskfleet.cli.fleet import VERBS, present_verbs
from deskfleet.fleet.acquaintance import concluded
from deskfleet.fleet.initial import Draft, NodeDraft, fleet_text
from deskfleet.fleet.launch import launch_to_json
from deskfleet.fleet.spec import read_spec
from tests.cli.cli_process import Done, deskfleet
from tests.fleet.fleet_texts import FULL, changed, launch_of, spark, write


def fleet(*arguments: str | Path, **environ: str) -> Done:
    return deskfleet("fleet", *arguments, **environ)


@pytest.mark.parametrize("verb", present_verbs())
def test_help_of_a_verb(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["fleet", verb, "--help"]) == 0
    out, err = capfd.readouterr()
    assert (out.splitlines()[2].strip(), err) == (VERBS[verb], "")
    assert verb == "config" or ("--json" in out and "--file" in out)
    assert main(["fleet", "--help"]) == 0
    assert f"  {verb} " in capfd.readouterr().out


def test_a_file_from_addresses_is_read_back_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    nodes = ("--node", "local", "--node", "me@spark-2.lan:2222", "--node", "10.0.0.3")
    done = fleet("init", *nodes, "--file", path, "--no-probe")
    assert done.code == 2, "a local head needs an address that the others reach"
    assert "nodes[0].fabric is missing" in done.err
    assert list(tmp_path.iterdir()) == []
    done = fleet("init", *nodes[2:], "--file", path, "--no-probe", "--name", "lab", "--json")
    assert (done.code, done.object["nodes"]) == (0, ["spark-2", "node-2"])
    spec = read_spec(path)
    assert (spec.name, spec.nodes[0].user, spec.nodes[0].port) == ("lab", "me", 2222)
    before = path.read_bytes()
    again = fleet("init", "--node", "x", "--file", path, "--no-probe", "--json")
    assert (again.code, again.object["error"]["hint"]) == (2, "give another name with --file")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["fleet.toml"]


def test_what_a_recipes_env_said_is_in_the_file_and_the_rest_is_named(tmp_path: Path) -> None:
    env = tmp_path / "old.env"
    env.write_text("WORKER_HOST=spark-2\nMASTER_ADDR=10.0.0.1\nTP_SIZE=2\nAPI_KEY=hunter2\nODD=1\n")
    path = tmp_path / "fleet.toml"
    done = fleet("init", "--from-env", env, "--file", path, "--no-probe", "--json")
    assert done.code == 0
    assert {each["variable"] for each in done.object["ignored"]} == {"API_KEY", "ODD"}
    assert "not taken: ODD: " in done.err
    text = path.read_text()
    assert "#   ODD: " in text
    assert "hunter2" not in text + done.out + done.err
    assert (read_spec(path).wishes.tp_size, read_spec(path).head.fabric) == (2, ("10.0.0.1",))


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd")
    monkeypatch.setenv("PATH", ssh_wrapper(tmp_path / "bin", server))
    config = tmp_path / "bin" / "ssh_config"
    config.write_text(f"{config.read_text()}  IdentityFile {server.identity}\n")
    yield server
    server.stop()


@pytest.mark.skipif(SSHD is None, reason=WHY_NOT)
def test_nodes_are_asked_what_they_are(tmp_path: Path, sshd: Sshd) -> None:
    path = tmp_path / "fleet.toml"
    done = fleet("init", "--node", f"127.0.0.1:{sshd.port}", "--file", path)
    assert done.code == 0, done.err
    assert f"# {os.uname().machine}, " in path.read_text().replace("# None, ", "# ")
    assert read_spec(path).head.port == sshd.port
    sshd.stop()
    other = tmp_path / "other.toml"
    done = fleet("init", "--node", f"127.0.0.1:{sshd.port}", "--node", "local", "--file", other)
    assert (done.code, other.exists()) == (3, False)
    assert "node node-1 cannot be reached" in done.err
    assert "--no-probe" in done.err


def test_config_shows_every_value_with_its_origin_and_no_secret(tmp_path: Path) -> None:
    path = write(tmp_path)
    done = fleet("config", "show", "--effective", "--file", path, "--json", HF_TOKEN="hunter2")
    values = {value["key"]: value for value in done.object["values"]}
    assert (done.code, done.object["fleet"], done.object["warnings"]) == (0, "desk", [])
    assert values["secrets.hub"]["value"] == "(set, from env:HF_TOKEN)"
    assert values["wishes.max_num_seqs"] == {"key": "wishes.max_num_seqs", "value": 4, "origin": "default"}
    shown = fleet("config", "show", "--file", path, "--set", "gateway.port=1", HF_TOKEN="hunter2")
    assert "gateway.port = 1  # --set\n" in shown.out
    assert "wishes.max_num_seqs" not in shown.out, "nobody wrote it"
    assert """nodes[1].paths.cache = "/home/me/it's \\"$HOME\\" ü"  # fleet.toml:27\n""" in shown.out
    assert "hunter2" not in done.out + done.err + shown.out + shown.err
    wrong = fleet("config", "show", "--file", write(tmp_path, changed("user = ", "usr = ")))
    assert (wrong.code, wrong.out) == (2, "")
    assert f"error: {path}:18: nodes[1].usr: unknown key\nhint: did you mean 'user'?\n" in wrong.err


def test_a_plan_of_the_file_and_of_the_planner_are_one(tmp_path: Path) -> None:
    path = write(tmp_path, FULL.replace("max_model_len = 131072", "max_model_len = 4096"))
    done = fleet("plan", "--file", path, "--json")
    assert (done.code, done.object["fits"]) == (1, False), "four boxes are needed"
    assert [rank["node"] for rank in done.object["ranks"]] == ["spark-1", "spark-2"]
    same = deskfleet(
        "plan", "--fleet", path, "--engine", "vllm", "--context", "4096", "--margin", "1GiB", "--json"
    )
    assert same.object["ranks"] == done.object["ranks"]
    screen = fleet("plan", "--file", path)
    assert "v4.1-flash on 2xspark, vLLM" in screen.out
    assert "--set wishes." in screen.err
    text = FULL.replace('kind = "spark"', 'kind = "local"').replace('available = "108GiB"\n', "")
    write(tmp_path, text)
    flags = (
        "--set",
        "checkpoint.model=pocket",
        "--set",
        "engine.name=native",
        "--set",
        "wishes.max_model_len=4096",
    )
    small = fleet("plan", "--file", path, *flags)
    assert (small.code, small.err) == (0, "")
    assert small.out.startswith("pocket on 2xlocal, deskfleet's own engine (CPU reference): fits\n")


def test_a_launch_becomes_files_that_are_never_written_over(tmp_path: Path) -> None:
    path, launch, out = write(tmp_path), tmp_path / "launch.json", tmp_path / "out"
    launch.write_bytes(launch_to_json(launch_of()))
    flags = ("compose", "--file", path, "--launch", launch, "--output", out)
    done = fleet("export", *flags)
    assert (done.code, done.out) == (0, "")
    files = sorted(str(each.relative_to(out)) for each in out.rglob("*.yaml"))
    assert files == ["spark-1/compose.yaml", "spark-2/compose.yaml"]
    (out / "spark-1" / "compose.yaml").write_text("mine")
    (out / "spark-2" / "compose.yaml").unlink()
    again = fleet("export", *flags)
    assert again.code == 2
    assert f"{out}/spark-1/compose.yaml is there already" in again.err
    assert [each.read_text() for each in out.rglob("*.yaml")] == ["mine"]
    printed = fleet("export", "k8s", "--file", path, "--launch", launch, "--json")
    assert list(printed.object["files"]) == ["desk.yaml"]
    native = fleet("export", "k8s", "--file", path, "--set", "engine.name=native")
    assert (native.code, "deskfleet fleet serve" in native.err) == (2, True)


def test_what_follows_from_facts(tmp_path: Path) -> None:
    draft = Draft(
        "desk", (NodeDraft("a", "local"), NodeDraft("b", "192.168.1.2"), NodeDraft("c", "10.0.22.3"))
    )
    known = [spark("a", 1, "/home/me"), spark("b", 2, "/home/you"), spark("c", 3, "/home/me")]
    spec = read_spec(write(tmp_path, fleet_text(concluded(draft, known))))
    assert [node.fabric for node in spec.nodes] == [("10.0.22.1",), ("10.0.22.2",), ("10.0.22.3",)]
    assert [node.kind for node in spec.nodes] == ["spark"] * 3
    assert [node.paths.cache for node in spec.nodes] == [
        "/home/me/deskfleet/cache",
        "/home/you/deskfleet/cache",
        "/home/me/deskfleet/cache",
    ]


def test_the_example_of_the_reference_is_read_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/fleet-file.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    assert len(read_spec(write(tmp_path, text)).nodes) == 3
    # What stands there as a comment is right as well, when it is made a value.
    values = [
        line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ") and " = " in line
    ]
    for value in values:
        tomllib.loads(value)
    assert json.dumps(values)
