"""Exports read back as their readers read them: nothing of a launch is lost, changed or shown that should not be."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deskfleet.errors import ConfigError
from deskfleet.fleet.export import FORMATS, export
from deskfleet.fleet.export.file import docker_options
from deskfleet.fleet.export.yaml import to_yaml
from deskfleet.fleet.fabric import resolve_fabric
from deskfleet.fleet.launch import LaunchSpec
from deskfleet.fleet.planning import plan_fleet
from deskfleet.fleet.render import render_launch
from deskfleet.fleet.spec import FleetSpec, read_source, read_spec
from tests.fleet.fleet_texts import DIGEST, FULL, launch_of, spark, write

TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=40).filter(
    lambda text: "${secret:" not in text
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> FleetSpec:
    return read_spec(write(tmp_path_factory.mktemp("fleet")))


def interpolated(text: str, environ: dict[str, str]) -> str:
    """What compose makes of a value: `$$` is a dollar, `${NAME:?...}` a variable, and no other `$` may be left."""
    result = ""
    while text:
        head, dollar, text = text.partition("$")
        result += head
        if not dollar:
            break
        if text.startswith("$"):
            result, text = f"{result}$", text[1:]
        else:
            assert text.startswith("{"), text
            inside, _, text = text[1:].partition("}")
            result += environ[inside.partition(":?")[0]]
    return result


def compose_services(launch: LaunchSpec, spec: FleetSpec) -> list[dict[str, Any]]:
    return [
        service
        for file in export("compose", launch, spec)
        for service in yaml.safe_load(file.text)["services"].values()
    ]


@settings(max_examples=60, deadline=None)
@given(value=TEXT)
def test_any_text_survives_compose(spec: FleetSpec, value: str) -> None:
    launch = launch_of(value)
    for rank, service in zip(launch.ranks, compose_services(launch, spec), strict=True):
        environ = {"HUB": "s$e"}
        argv = [interpolated(word, environ) for word in (*service["entrypoint"], *service["command"])]
        assert argv == list(rank.argv)
        env = {name: interpolated(text, environ) for name, text in service["environment"].items()}
        assert env == {**rank.env, "HF_TOKEN": "s$e", "URL": "x-s$e$5"}
        assert interpolated(service["volumes"][0]["source"], environ) == f"/srv/{value}"


SAID_OTHERWISE = {
    "--name": "container_name", "--label": "labels", "--pull": "pull_policy", "--restart": "restart",
    "--network": "network_mode", "--ipc": "ipc", "--ulimit": "ulimits", "--oom-score-adj": "oom_score_adj",
    "--stop-timeout": "stop_grace_period", "--log-driver": "logging", "--log-opt": "logging",
    "--memory": "mem_limit", "--memory-swap": "memswap_limit", "--gpus": "deploy", "--cap-add": "cap_add",
    "--device": "devices", "--mount": "volumes", "--env": "environment", "--env-file": "environment",
    "--entrypoint": "entrypoint",
}  # fmt: skip


def test_compose_says_all_that_docker_is_told(spec: FleetSpec) -> None:
    launch = launch_of()
    services = compose_services(launch, spec)
    for rank, service in zip(launch.ranks, services, strict=True):
        for option in docker_options(rank):
            assert SAID_OTHERWISE[option] in service, option
    assert services[0]["ulimits"]["memlock"] == -1
    assert services[0]["logging"]["options"]["max-file"] == "5"
    assert services[0]["restart"] == "no"


def expanded(text: str, environ: dict[str, str]) -> str:
    """What Kubernetes makes of a value: `$$` is a dollar, `$(NAME)` a variable that was defined before."""
    result, rest = "", text
    while rest:
        head, dollar, rest = rest.partition("$")
        result += head
        if dollar and rest.startswith("$"):
            result, rest = f"{result}$", rest[1:]
        elif dollar and rest.startswith("("):
            name, _, rest = rest[1:].partition(")")
            result += environ[name]
        else:
            result += dollar
    return result


@settings(max_examples=60, deadline=None)
@given(value=TEXT)
def test_any_text_survives_kubernetes(spec: FleetSpec, value: str) -> None:
    launch = launch_of(value)
    (file,) = export("k8s", launch, spec)
    pods = list(yaml.safe_load_all(file.text))
    assert [pod["metadata"]["name"] for pod in pods] == ["deskfleet-desk-1", "deskfleet-desk-0"]
    for rank, pod in zip(launch.start_order, pods, strict=True):
        (container,) = pod["spec"]["containers"]
        environ: dict[str, str] = {}
        for each in container["env"]:
            source = each.get("valueFrom", {}).get("secretKeyRef")
            environ[each["name"]] = "s$e" if source else expanded(each["value"], environ)
        assert {name: environ[name] for name in rank.env} == {**rank.env, "HF_TOKEN": "s$e", "URL": "x-s$e$5"}
        argv = [expanded(word, environ) for word in (*container["command"], *container["args"])]
        assert argv == list(rank.argv)
        assert pod["spec"]["nodeSelector"] == {"kubernetes.io/hostname": rank.node}
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["volumes"][0]["hostPath"]["path"] == f"/srv/{value}"
        names = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names


@settings(max_examples=60, deadline=None)
@given(
    value=TEXT.filter(lambda text: not any(f"{{{name}}}" in text for name in ("model", "tensor_parallel")))
)
def test_any_text_survives_sparkrun(spec: FleetSpec, value: str) -> None:
    launch = launch_of(value)
    for rank in launch.ranks:
        del rank.env["URL"]
    (file,) = export("sparkrun", launch, spec)
    recipe = yaml.safe_load(file.text)
    words = shlex.split(recipe["command"])
    given = dict(recipe["env"])
    while words[0] != "vllm":
        name, equals, text = words.pop(0).partition("=")
        if equals:
            given[name] = text
    assert words == ["vllm", "serve", "/model", "--note", value]
    assert given == {"NOTE": value, "HF_TOKEN": "${HUB}"}
    assert not any("$" in text for name, text in recipe["env"].items() if name != "HF_TOKEN")
    assert (recipe["runtime"], recipe["min_nodes"], recipe["container"]) == ("vllm-distributed", 2, DIGEST)
    assert "RANK_IP" in file.text
    assert f"/model (of the node: /srv/{value})" in file.text
    assert recipe["model"] == "deepseek-ai/DeepSeek-V4.1-Flash"


def test_sparkrun_says_itself_where_the_checkpoint_is(spec: FleetSpec) -> None:
    launch = launch_of("models/v4.1 flash")
    for rank in launch.ranks:
        del rank.env["URL"]
    (file,) = export("sparkrun", launch, spec)
    assert yaml.safe_load(file.text)["command"].startswith("vllm serve {model} --note 'models/v4.1 flash'")


def exec_start(unit: str) -> list[str]:
    """The words of a unit's ExecStart, by the rules of systemd.service(5) for what is within double quotes."""
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    words, rest = [], line.removeprefix("ExecStart=")
    while rest:
        assert rest[0] == '"'
        word, at = "", 1
        while rest[at] != '"':
            pair = rest[at : at + 2]
            if pair in ("\\\\", '\\"', "%%", "$$"):
                word, at = word + pair[1], at + 2
            else:
                assert rest[at] not in "\\%$", pair
                word, at = word + rest[at], at + 1
        words.append(word)
        rest = rest[at + 1 :].removeprefix(" ")
    return words


@settings(max_examples=60, deadline=None)
@given(value=TEXT)
def test_any_text_survives_systemd(spec: FleetSpec, value: str) -> None:
    launch = launch_of(value)
    for rank, file in zip(launch.ranks, export("systemd", launch, spec), strict=True):
        words = exec_start(file.text)
        image = words.index(DIGEST)
        assert (words[image - 1], *words[image + 1 :]) == rank.argv
        assert f"NOTE={value}" in words
        assert "HF_TOKEN" in words
        assert not any("secret:" in word for word in words)


def test_systemd_itself_finds_nothing_wrong(tmp_path: Path, spec: FleetSpec) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    for file in export("systemd", launch_of(), spec):
        path = tmp_path / Path(file.path).name
        # The command need not be here for its line to be judged; the services it waits for are not either.
        text = file.text.replace('ExecStart="docker"', 'ExecStart="/bin/true"').replace(
            "=docker stop", "=/bin/true"
        )
        path.write_text(text.replace("Requires=docker.service\n", ""))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FORMATS)
def test_every_file_says_what_it_is_and_repeats_no_secret(name: str, spec: FleetSpec) -> None:
    launch = launch_of("plain")
    if name == "sparkrun":
        for rank in launch.ranks:
            del rank.env["URL"]
    files = export(name, launch, spec)
    assert len({file.path for file in files}) == len(files)
    for file in files:
        assert file.text.startswith("# Fleet desk: v4.1-flash with vllm on 2 ranks")
        assert "deskfleet gateway --upstream http://10.0.22.1:8100" in file.text
        body = "\n".join(line for line in file.text.splitlines() if not line.startswith("#"))
        assert "secret:" not in body


def test_what_cannot_be_exported_is_refused(spec: FleetSpec) -> None:
    with pytest.raises(ConfigError, match="ranks of the native engine"):
        export("compose", launch_of(engine="native"), spec)
    with pytest.raises(ConfigError, match=r"\{model\}, which sparkrun would replace"):
        export("sparkrun", launch_of("{model}"), spec)
    with pytest.raises(ConfigError, match=r"URL has a secret and a \$"):
        export("sparkrun", launch_of("x"), spec)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_rendered_for_four_sparks_can_be_exported(tmp_path: Path, engine: str) -> None:
    nodes = [f'[[nodes]]\nname = "s{i}"\naddress = "10.0.22.{i}"\nkind = "spark"\n' for i in range(1, 5)]
    text = (
        FULL.partition("[[nodes]]")[0] + "".join(nodes) + "[checkpoint]" + FULL.partition("[checkpoint]")[2]
    )
    source = read_source(write(tmp_path, text), [f"engine.name={engine}", "engine.args=[]"])
    known = {node.name: spark(node.name, i, "/home/me") for i, node in enumerate(source.spec.nodes, 1)}
    fabric = resolve_fabric(source.spec.nodes, known)
    launch = render_launch(plan_fleet(source).best, source.spec, fabric.nodes, known, launch_id="x")
    for name in FORMATS:
        for file in export(name, launch, source.spec):
            if file.path.endswith(".yaml"):
                assert list(yaml.safe_load_all(file.text))
    recipe = yaml.safe_load(export("sparkrun", launch, source.spec)[0].text)
    assert "{model}" in recipe["command"]
    assert "--node-rank" not in recipe["command"]
    assert not any(name.startswith("NCCL_IB_GID") for name in recipe["env"])


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(st.characters(exclude_categories=("Cs",)))
)


@settings(deadline=None)
@given(
    value=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",))),
        st.recursive(
            SCALARS,
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(st.sampled_from("aynÜ: #")), inner, max_size=3)
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_yaml_is_read_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_files_of_a_directory_are_apart(spec: FleetSpec) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for file in export("compose", launch_of(), spec):
            path = Path(directory) / file.path
            path.parent.mkdir()
            path.write_text(file.text)
        assert sorted(each.parent.name for each in Path(directory).rglob("*.yaml")) == ["spark-1", "spark-2"]
