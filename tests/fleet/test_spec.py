"""A fleet.toml as its author sees it: what is understood, and how each mistake is named."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskfleet.errors import ConfigError
from deskfleet.fleet.initial import Draft, NodeDraft, fleet_text, parse_node, with_names
from deskfleet.fleet.secrets import read_secret
from deskfleet.fleet.spec import GatewaySpec, NodePaths, read_spec
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.planner.fleetfile import read_fleet
from deskfleet.planner.wishes import Wishes
from deskfleet.tomlfile import quoted, read_toml
from tests.fleet.fleet_texts import DIGEST, FULL, changed, write


def test_everything_in_a_file_is_in_the_spec(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path))
    head, worker = spec.nodes
    assert (spec.name, spec.path, spec.share, spec.warnings) == ("desk", tmp_path / "fleet.toml", "nfs", ())
    assert (head.address, head.fabric, head.available_bytes) == (
        "local",
        ("10.0.22.1", "10.0.23.1"),
        108 << 30,
    )
    assert head.paths == NodePaths(
        "/srv/models/v4.1 flash", "/var/cache/deskfleet/engram", "/var/cache/deskfleet"
    )
    assert (worker.address, worker.user, worker.port) == ("spark-2.lan", "me", 2222)
    assert worker.identity == str(tmp_path / "keys/id")
    assert worker.paths.cache == """/home/me/it's "$HOME" ü"""
    assert worker.paths.engram == """/home/me/it's "$HOME" ü/engram"""
    assert spec.checkpoint.origin == "https://models.example/deepseek-ai/DeepSeek-V4.1-Flash"
    assert (spec.engine.name, spec.engine.image) == ("vllm", DIGEST)
    assert spec.engine.args == ("--note", "two words, $PATH and 'quotes'")
    assert dict(spec.engine.env) == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "${secret:hub}"}
    assert spec.wishes == Wishes(engine="vllm", max_model_len=131072, margin_bytes=1 << 30)
    assert (spec.gateway.port, spec.gateway.keys) == (8410, str(tmp_path / "keys.toml"))
    assert dict(spec.secrets) == {"hub": "env:HF_TOKEN"}
    assert pickle.loads(pickle.dumps(spec)) == spec, "it travels between processes"


def test_a_mark_at_the_beginning_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    plain = read_spec(write(tmp_path))
    (tmp_path / "fleet.toml").write_bytes(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode())
    assert read_spec(tmp_path / "fleet.toml") == plain


# what is changed in the file, the place that must be named, what must be said, what the hint must say
MISTAKES = {
    "unknown table": (changed("[wishes]", "[wish]"), ":41: wish: unknown key", "did you mean 'wishes'?"),
    "unknown key": (changed("user = ", "usr = "), ":18: nodes[1].usr: unknown key", "'user'"),
    "key of another table": (
        changed("port = 8410", "ports = 8410"),
        ":46: gateway.ports: unknown key",
        "'port'",
    ),
    "no TOML": (changed('share = "nfs"', "share = nfs"), "is not TOML: Invalid value (at line 2", ""),
    "wrong type": (changed("port = 2222", 'port = "2222"'), ":19: nodes[1].port is '2222': ", ""),
    "within a list": (
        changed('"10.0.22.2",', '"10.0.22.2", "a b",'),
        ":21: nodes[1].fabric[1] is 'a b': is no address",
        "",
    ),
    "no name": (changed('name = "desk"', ""), "name is missing", "containers"),
    "name": (changed('"desk"', '"Desk 1"'), ":1: name is 'Desk 1': ", ""),
    "node's name": (changed('"spark-2"', '"spark 2"'), ":16: nodes[1].name is 'spark 2'", ""),
    "one name twice": (
        changed('"spark-2"', '"SPARK-1"'),
        ":16: nodes[1].name is 'SPARK-1': two nodes of one name",
        "",
    ),
    "one address twice": (
        changed('address = "local"', 'address = "spark-2.lan"\nport = 2222'),
        "nodes[1].address is 'spark-2.lan', where spark-1 is already",
        "differ by port",
    ),
    "one fabric address twice": (
        changed('"10.0.22.2",', '"10.0.23.1",'),
        ":21: nodes[1].fabric[0] is '10.0.23.1', and spark-1 has it already",
        "",
    ),
    "loopback as fabric": (
        changed('"10.0.22.2",', '"127.0.0.1",'),
        ":21: nodes[1].fabric[0] is '127.0.0.1', which other nodes cannot reach",
        "",
    ),
    "local without fabric": (
        changed('fabric = ["10.0.22.1", "10.0.23.1"]\n', ""),
        ":8: nodes[0].fabric is missing",
        "other nodes",
    ),
    "local with a user": (
        changed('address = "local"', 'address = "local"\nuser = "me"'),
        ":11: nodes[0].user is 'me', and the node is local",
        "no ssh",
    ),
    "user in address": (changed('"spark-2.lan"', '"me@spark-2"'), "'me@spark-2': has an @", "the key user"),
    "port in address": (changed('"spark-2.lan"', '"spark-2:22"'), "'spark-2:22': has a port", "the key port"),
    "option as address": (changed('"spark-2.lan"', '"-oProxyCommand=x"'), "is no address", ""),
    "relative path": (
        changed('"/srv/models/v4.1 flash"', '"~/models"'),
        ":5: paths.checkpoint is '~/models': is not absolute",
        "as it is on that node",
    ),
    "root as path": (changed('"/var/cache/deskfleet"', '"//"'), ":6: paths.cache is '//': is the root", ""),
    "line in a path": (
        changed('"/var/cache/deskfleet"', '"/a\\nb"'),
        "paths.cache is '/a\\nb': has control",
        "",
    ),
    "no path": (
        changed('checkpoint = "/srv/models/v4.1 flash"\n', ""),
        "nodes[0].paths.checkpoint is missing",
        "[paths] with checkpoint",
    ),
    "more than there is": (changed("108GiB", "1TiB"), ":13: nodes[0].available is too much", ""),
    "no unit": (changed("108GiB", "108G"), "nodes[0].available is '108G': not a byte quantity", "2GiB"),
    "kind": (
        changed('kind = "spark"\navailable', 'kind = "sparc"\navailable'),
        ":12: nodes[0].kind is 'sparc'",
        "did you mean 'spark'?",
    ),
    "tag": (
        changed(DIGEST, "vllm/vllm-openai:latest"),
        ":36: engine.image is 'vllm/vllm-openai:latest'",
        "allow_tag",
    ),
    "short digest": (changed("a1" * 32, "a1"), "no digest", "64 digits"),
    "engine": (changed('name = "vllm"', 'name = "vlm"'), ":35: engine.name is 'vlm'", ""),
    "profile": (
        changed('share = "nfs"', 'profile = "max-contxt"'),
        ":2: profile is 'max-contxt', no profile",
        "did you mean 'max-context'?",
    ),
    "profile and what it decides": (
        changed('share = "nfs"', 'profile = "max-context"').replace(
            "max_model_len = 131072", "max_num_seqs = 2"
        ),
        "wishes.max_num_seqs is 2, and profile max-context says",
        "",
    ),
    "password in the origin": (
        changed("//models.", "//me:pw@models."),
        "is 'https://...@models.example/deepseek-ai/DeepSeek-V4.1-Flash/': has a user's name in it",
        "does not belong",
    ),
    "mount": (
        changed("/opt/certs:", "certs:"),
        ":39: engine.mounts[0] is 'certs:/etc/ssl/certs:ro': is no mount",
        "",
    ),
    "secret in an argument": (
        changed('"--note"', '"--key=${secret:hub}"'),
        ":37: engine.args[0] asks for a secret",
        "[engine.env]",
    ),
    "secret that is not there": (
        changed("${secret:hub}", "${secret:hbu}"),
        "asks for the secret 'hbu'",
        "did you mean 'hub'?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_place_its_value_and_a_hint(tmp_path: Path, mistake: str) -> None:
    text, message, hint = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_spec(path)
    assert str(path) in raised.value.message
    assert message in raised.value.message
    assert raised.value.hint
    assert hint in raised.value.hint


HARSH = "hunter2 and more"


@pytest.mark.parametrize(
    "text",
    [
        changed('hub = "env:HF_TOKEN"', f'hub = "{HARSH}"'),
        changed('hub = "env:HF_TOKEN"', f'hub = ["{HARSH}"]'),
        changed('hub = "env:HF_TOKEN"', f'hub = "env:{HARSH}"'),
        changed('hub = "env:HF_TOKEN"', f'hub = "{HARSH}'),
        changed('"${secret:hub}"', f'"{HARSH}"'),
        changed('"${secret:hub}"', f'"{HARSH}\\n"'),
        changed('"${secret:hub}"', f'["{HARSH}"]'),
    ],
)
def test_a_secret_in_the_file_is_refused_and_never_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_spec(write(tmp_path, text))
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, changed("user = ", "usr = ").replace("port = 8410", "port = 99999"))
    with pytest.raises(ConfigError, match=r"(?s)nodes\[1\]\.usr: unknown key.*gateway\.port is 99999"):
        read_spec(path)


def test_flags_go_before_the_file_and_are_named_in_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path)
    spec = read_spec(
        path, ["wishes.max_model_len=65536", "nodes[1].address=10.0.0.9", "engine.env.X= $a 'b'"]
    )
    assert spec.wishes.max_model_len == 65536
    assert spec.nodes[1].address == "10.0.0.9"
    assert spec.engine.env["X"] == " $a 'b'"
    for flag, said in {
        "wishes.max_model_len=0": "--set wishes.max_model_len is 0",
        "nodes[7].user=x": "there is no [7]",
        "wishes": "is no KEY=VALUE",
        "name.x=1": "of what is no table",
        "gateway.prot=1": "--set gateway.prot: unknown key",
    }.items():
        with pytest.raises(ConfigError) as raised:
            read_spec(path, [flag])
        assert said in raised.value.message


def test_what_is_allowed_and_regretted_is_a_warning(tmp_path: Path) -> None:
    text = changed(f'image = "{DIGEST}"', 'image = "vllm:1"\nallow_tag = true')
    text = text.replace("fb2764a5cf321eaa5070ca8f9e892818f477c16d", "main")
    text = text.replace('keys = "keys.toml"', 'host = "0.0.0.0"')
    warnings = read_spec(write(tmp_path, text)).warnings
    assert [each.partition(": ")[2].partition(" ")[0] for each in warnings] == [
        "engine.image",
        "checkpoint.revision",
        "gateway.host",
    ]


def test_an_image_that_is_built_has_a_name(tmp_path: Path) -> None:
    text = changed(f'image = "{DIGEST}"', 'image = "mine"\nbuild = true')
    assert read_spec(write(tmp_path, text)).engine.build
    with pytest.raises(ConfigError, match="is a digest, and build is true"):
        read_spec(write(tmp_path, changed("args = ", "build = true\nargs = ")))


def test_a_profile_of_the_planner_lies_below_the_wishes(tmp_path: Path) -> None:
    profile = Path(__file__).parents[2] / "profiles" / "v4.1-flash-4xspark-max-context.toml"
    (tmp_path / "long.toml").write_text(profile.read_text())
    text = changed('share = "nfs"', 'profile = "long.toml"')
    wishes = read_spec(write(tmp_path, text)).wishes
    assert (wishes.max_model_len, wishes.max_num_seqs, wishes.kv_format) == (131072, 1, "fp8")
    with pytest.raises(ConfigError, match=r"engine\.name is 'sglang', and the profile is for 'vllm'"):
        read_spec(write(tmp_path, text.replace('name = "vllm"', 'name = "sglang"')))
    (tmp_path / "long.toml").write_text(profile.read_text().replace("num_drafts", "drafts"))
    with pytest.raises(ConfigError, match=r"long.toml:\d+: profile.drafts: unknown key"):
        read_spec(write(tmp_path, text))


def test_the_planner_reads_the_same_file(tmp_path: Path) -> None:
    cluster = read_fleet(write(tmp_path))
    assert [(node.name, node.available_bytes >> 30) for node in cluster.nodes] == [
        ("spark-1", 108),
        ("spark-2", 111),
    ]


def test_defaults_of_the_gateway_are_those_of_the_gateway() -> None:
    settings = GatewaySettings(model_id="x", checkpoint=Path())
    draft = fleet_text(Draft("x", (NodeDraft("a", "local", kind="local"),)))
    with tempfile.TemporaryDirectory() as directory:
        gateway = read_spec(write(Path(directory), draft)).gateway
    assert gateway == GatewaySpec(
        settings.host,
        settings.port,
        None,
        thinking=settings.default_thinking,
        debug_answers=settings.debug_answers,
    )


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"abc\n", 0o640, "has mode 0640"),
        (b"abc\n", 0o602, "has mode 0602"),
        (b"abc\ndef\n", 0o600, "has several lines"),
        (b"a\x1bc", 0o600, "control characters"),
        (b"\n", 0o600, "is empty"),
        (b"\xff", 0o600, "is not UTF-8"),
        (b"x" * 20000, 0o600, "longer than"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_file_of_a_secret_is_for_its_owner_and_of_one_line(
    tmp_path: Path, content: bytes | None, mode: int, said: str
) -> None:
    path = tmp_path / "a secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError) as raised:
        read_secret("hub", f"file:{path}", {})
    assert said in raised.value.message
    assert "abc" not in str(raised.value)


def test_a_secret_that_is_right_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xef\xbb\xbf a $b 'c'\r\n")
    path.chmod(0o400)
    assert read_secret("hub", f"file:{path}", {}) == " a $b 'c'"
    assert read_secret("hub", "env:X", {"X": "v"}) == "v"
    with pytest.raises(ConfigError, match="the variable X is not set"):
        read_secret("hub", "env:X", {})


def test_lines_are_told_right_around_strings_comments_and_nested_tables(tmp_path: Path) -> None:
    text = '''\
a.b = 1 # [c]
"x.y" = """
[no]
z = 1
"""
list = [ # [[
  "]", {k = 1},
]
[[t]]
v = "# [t2]"
[[t]]
[t.'s s'.u]
v = 1
[[t.w]]
  v = \'\'\'it's\'\'\'
[[t.w]]
v = 2
'''
    lines = read_toml(write(tmp_path, text), hint="").lines
    assert dict(lines) == {
        ("a",): 1,
        ("a", "b"): 1,
        ("x.y",): 2,
        ("list",): 6,
        ("t", 0): 9,
        ("t", 0, "v"): 10,
        ("t", 1): 11,
        ("t", 1, "s s", "u"): 12,
        ("t", 1, "s s", "u", "v"): 13,
        ("t", 1, "w", 0): 14,
        ("t", 1, "w", 0, "v"): 15,
        ("t", 1, "w", 1): 16,
        ("t", 1, "w", 1, "v"): 17,
    }


VALUES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=40).filter(
    lambda text: "${secret:" not in text
)


@given(value=VALUES, part=VALUES.filter(lambda text: "/" not in text and text not in (".", "..")))
def test_any_text_travels_unharmed(value: str, part: str) -> None:
    text = changed("\"two words, $PATH and 'quotes'\"", quoted(value)).replace('"INFO"', quoted(value))
    text = text.replace('"/srv/models/v4.1 flash"', quoted(f"/srv/{part}"))
    with tempfile.TemporaryDirectory() as directory:
        spec = read_spec(write(Path(directory), text))
    assert spec.engine.args[1] == spec.engine.env["NCCL_DEBUG"] == value
    assert spec.nodes[0].paths.checkpoint == f"/srv/{part}"


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("spark-1.lan", ("spark-1", "spark-1.lan", None, None)),
        ("me@10.0.0.1:2222", ("", "10.0.0.1", "me", 2222)),
        ("fe80::1", ("", "fe80::1", None, None)),
        ("me@[fe80::1]:22", ("", "fe80::1", "me", 22)),
        ("local", ("head", "local", None, None)),
    ],
)
def test_a_node_on_the_command_line(text: str, node: tuple[str, str, str | None, int | None]) -> None:
    draft = parse_node(text)
    assert (draft.name, draft.address, draft.user, draft.port) == node


@pytest.mark.parametrize("text", ["", "a b", "a@b@c", "host:port", "[::1", "@x"])
def test_no_node(text: str) -> None:
    with pytest.raises(ConfigError, match="--node"):
        parse_node(text)


def test_nodes_get_names_that_differ() -> None:
    nodes = with_names([parse_node(text) for text in ("10.0.0.1", "a.x", "a.y", "10.0.0.2", "A.z")])
    names = [node.name for node in nodes]
    assert names[:2] == ["node-1", "a"]
    assert len({name.casefold() for name in names}) == 5


def test_a_relative_file_is_relative_to_where_the_fleet_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    spec = read_spec(Path(tmp_path.name) / "fleet.toml")
    assert (spec.path, spec.gateway.keys) == (tmp_path / "fleet.toml", str(tmp_path / "keys.toml"))
