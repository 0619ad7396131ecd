"""The settings file: its layers, its mistakes, and reading it again. Takes about two seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from deskfleet.errors import ConfigError
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.gateway.policies.completion_cap import CompletionCapSettings
from deskfleet.gateway.policies.images import ImageSettings
from deskfleet.gateway.policies.section import Section
from deskfleet.gateway.policy_file import KeySections, Policies, PolicySettings, PolicyStore, read_policies

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
MODEL = "deepseek-v4.1-flash"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def keys(path: Path, *names: str) -> dict[str, str]:
    """Make a file of keys and return what they are by name."""
    made = {name: make_secret() for name in names}
    for name, secret in made.items():
        change_key_file(path, lambda old, name=name, secret=secret: old.with_key(name, secret, NOW))  # type: ignore[misc]
    return made


LAYERED = f"""
keys_file = "keys.toml"

[completion_cap]
max_tokens = 65536
default_max_tokens = 4096

[loop_abort]
data_tokens = 1000

[images]
max_image_bytes = "20MiB"

[images.fetch]
ports = [443]

[models."{MODEL}".completion_cap]
max_tokens = 32768

[models."{MODEL}".images.fetch]
enabled = true
timeout_s = 5

[keys."alice".completion_cap]
max_tokens = 131072

[keys."alice".sampling_defaults.thinking]
top_p = 0.9

[keys.bob.loop_abort]
enabled = false
"""


def test_layers(tmp_path: Path) -> None:
    keys(tmp_path / "keys.toml", "alice", "bob")
    store = PolicyStore(path=write(tmp_path / "p.toml", LAYERED), model_ids=[MODEL])
    settings = store.snapshot.settings
    caps = {
        (model, key): settings.resolved(model, key).completion_cap.max_tokens
        for model in (None, MODEL)
        for key in (None, "alice", "bob")
    }
    assert caps == {
        (None, None): 65536,
        (None, "alice"): 131072,
        (None, "bob"): 65536,
        (MODEL, None): 32768,
        (MODEL, "alice"): 131072,
        (MODEL, "bob"): 32768,
    }
    alice = settings.resolved(MODEL, "alice")
    assert alice.completion_cap.default_max_tokens == 4096, "what a layer does not say comes from below"
    assert (alice.sampling_defaults.thinking.top_p, alice.sampling_defaults.thinking.temperature) == (
        0.9,
        1.0,
    )
    assert alice.sampling_defaults.not_thinking.top_p == 0.95
    assert alice.images.max_image_bytes == 20 * 2**20
    assert (alice.images.fetch.enabled, alice.images.fetch.ports, alice.images.fetch.timeout_s) == (
        True,
        (443,),
        5.0,
    )
    assert settings.resolved(None, None).images.fetch.enabled is False
    bob = settings.resolved(MODEL, "bob").loop_abort
    assert (bob.enabled, bob.data_tokens) == (False, 1000)


class _Inner(Section):
    a: int = 1
    b: int = 2


class _Outer(Section):
    x: int = 3
    inner: _Inner = _Inner()


VALUES = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9))
SAID = st.fixed_dictionaries({}, optional={"x": st.integers(0, 9), "inner": VALUES})


@given(st.lists(SAID, min_size=1, max_size=4))
def test_laying_over_is_merging_what_was_said(layers: list[dict[str, object]]) -> None:
    """Against merging the tables themselves."""
    result = _Outer.model_validate(layers[0])
    merged: dict[str, object] = {"x": 3, "inner": {"a": 1, "b": 2}}
    for number, layer in enumerate(layers):
        if number:
            result = result.under(_Outer.model_validate(layer))
        for name, value in layer.items():
            merged[name] = merged[name] | value if isinstance(value, dict) else value  # type: ignore[operator]
    assert result.model_dump() == merged


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (
            "[completion_cap]\nmax_tokns = 5",
            "p.toml:2: completion_cap.max_tokns: there is no such setting",
            "'max_tokens'",
        ),
        (
            "[completion_capp]\nmax_tokens = 5",
            "p.toml:1: completion_capp: there is no such setting",
            "'completion_cap'",
        ),
        ("[completion_cap]\nmax_tokens = '5'", "p.toml:2: completion_cap.max_tokens is '5': ", None),
        ("[completion_cap]\n\n# no\nmax_tokens = 0", "p.toml:4: completion_cap.max_tokens is 0: ", None),
        ("[completion_cap]\nmax_tokens = 6.0", "completion_cap.max_tokens is 6.0: ", None),
        ("[completion_cap]\nenabled = 1", "completion_cap.enabled is 1: ", None),
        ("completion_cap.max_tokens = -1", "p.toml:1: completion_cap.max_tokens is -1: ", None),
        (
            "[images]\nfetch = {enabled = true, tmeout_s = 3}",
            "p.toml:2: images.fetch.tmeout_s: there is",
            "'timeout_s'",
        ),
        (
            "[images]\nmax_image_bytes = '20 parsecs'",
            "p.toml:2: images.max_image_bytes is '20 parsecs': ",
            None,
        ),
        (
            '[keys."alice".completion_cap]\nmax_token = 1',
            "p.toml:2: keys.alice.completion_cap.max_token: ",
            "'max_tokens'",
        ),
        ('[models."x".completion_cap]\nmax_tokens = 1', "p.toml:1: models.x: there is no model 'x'", MODEL),
        (
            '[models."deepseek-v4-flash".completion_cap]\nmax_tokens = 1',
            "there is no model",
            f"did you mean '{MODEL}'?",
        ),
        (
            '[keys."alic".completion_cap]\nmax_tokens = 1',
            "p.toml:1: keys.alic: there is no key 'alic'",
            "'alice'",
        ),
        (f'[models."{MODEL}".admission]\nmax_running = 1', "there is no such setting", "known: "),
        (
            f'[models."{MODEL}".request_limits]\nmax_depth = 9',
            "request_limits: there is no such setting",
            "known: ",
        ),
        ("[health]\nsilent = 5", "p.toml:2: health.silent: there is no such setting", "'silent_s'"),
        ("[health]\nperiod_s = 5", "p.toml:2: health.period_s is 5.0: ", None),
        (
            "[health]\nmemory_floor_bytes = '1GiB'\nmemory_critical_bytes = '2GiB'",
            "memory_critical_bytes 2147483648 is more than memory_floor_bytes 1073741824",
            None,
        ),
        (f'[models."{MODEL}".health]\nstrikes = 1', "there is no such setting", "known: "),
        ("[completion_cap\nmax_tokens = 1", "p.toml is not TOML: ", None),
        (
            "[completion_cap]\nmax_tokens = 1\nmax_tokens = 2\n",
            "p.toml is not TOML: Cannot overwrite a value (at line 3",
            None,
        ),
        ("keys_file = 5", "p.toml:1: keys_file is 5: ", None),
        ('[deadlines]\ntimeout_s = "dfk_' + "s3cr3t" * 6 + '"', "deadlines.timeout_s is '[key]'", None),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str, hint: str | None) -> None:
    path = write(tmp_path / "p.toml", text)
    with pytest.raises(ConfigError) as raised:
        read_policies(path, model_ids=[MODEL], key_names=["alice"])
    assert said in raised.value.message
    assert "s3cr3t" not in str(raised.value)
    if hint is not None:
        assert hint in (raised.value.hint or "")


def test_several_mistakes_are_named_together(tmp_path: Path) -> None:
    text = "[completion_cap]\nmax_tokens = 0\n[share]\nweight = 0\nmax_wait_s = 'long'\n[nothing]\n"
    with pytest.raises(ConfigError) as raised:
        read_policies(write(tmp_path / "p.toml", text))
    for part in ("p.toml:2: ", "p.toml:4: share.weight", "p.toml:5: share.max_wait_s", "p.toml:6: nothing"):
        assert part in raised.value.message
    with pytest.raises(ConfigError, match="cannot read"):
        read_policies(tmp_path / "none.toml")


@examples(deadline=None)
@given(
    st.text(max_size=60), st.sampled_from(["", "[keys.x]\n", "[completion_cap]\nmax_tokens = ", "[images]\n"])
)
def test_no_file_raises_anything_else(text: str, before: str) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "p.toml"
        path.write_text(before + text, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(ConfigError):
            assert read_policies(path).keys == {}, "no key is known"


def test_every_setting_can_be_written(tmp_path: Path) -> None:
    """Each default, written out as TOML, reads back as itself: the file's types are ones that TOML has."""

    def table(name: str, section: Section) -> list[str]:
        lines, tables = [f"[{name}]"], []
        for field in type(section).model_fields:
            value = getattr(section, field)
            if isinstance(value, Section):
                tables += table(f"{name}.{field}", value)
            elif isinstance(value, bool):
                lines.append(f"{field} = {str(value).lower()}")
            elif isinstance(value, tuple):
                lines.append(f"{field} = {list(value)}")
            elif value is not None:
                lines.append(f"{field} = {value}")
        return [*lines, *tables]

    text = []
    defaults = PolicySettings()
    for name in (*KeySections.model_fields, "admission", "health"):
        text += table(name, getattr(defaults, name))
    written = read_policies(write(tmp_path / "p.toml", "\n".join(text)))
    assert written.resolved(None, None).model_dump() == defaults.resolved(None, None).model_dump()
    assert (written.admission, written.health) == (defaults.admission, defaults.health)


# --- reading it again -----------------------------------------------------------------------------------


def store_with(tmp_path: Path, text: str) -> tuple[PolicyStore, dict[str, str], Path]:
    made = keys(tmp_path / "keys.toml", "alice", "bob")
    path = write(tmp_path / "p.toml", text)
    return PolicyStore(path=path, model_ids=[MODEL]), made, path


def cap(store: PolicyStore, key: str | None = None) -> int | None:
    return store.snapshot.settings.resolved(MODEL, key).completion_cap.max_tokens


def test_reload_exchanges_everything_or_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, made, path = store_with(tmp_path, 'keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 5\n')
    ring = store.ring()
    assert ring is not None
    write(path, 'keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 6\n')
    assert (cap(store), store.reload(), cap(store)) == (5, (), 6)
    write(path, 'keys_file = "keys.toml"\n[completion_cap]\nmax_tokens = 7\nmax_tokns = 8\n')
    with caplog.at_level(logging.ERROR):
        (problem,) = store.reload()
    assert problem.startswith("settings are as they were: ")
    assert (
        "p.toml:4: completion_cap.max_tokns: there is no such setting (did you mean 'max_tokens'?)" in problem
    )
    assert problem in caplog.text
    assert cap(store) == 6
    path.unlink()
    assert "cannot read" in store.reload()[0]
    assert cap(store) == 6
    assert store.ring() is not None
    assert store.ring().name_of(made["alice"]) == "alice"  # type: ignore[union-attr]


def test_a_revoked_key_is_out_whatever_the_settings_say(tmp_path: Path) -> None:
    store, made, path = store_with(
        tmp_path, 'keys_file = "keys.toml"\n[keys."alice".completion_cap]\nmax_tokens = 5\n'
    )
    change_key_file(tmp_path / "keys.toml", lambda old: old.without("alice", NOW))
    assert store.reload() == (), "settings of a revoked key are no mistake"
    ring = store.ring()
    assert ring is not None
    assert (ring.name_of(made["alice"]), ring.name_of(made["bob"])) == (None, "bob")
    write(path, "[nonsense]")
    change_key_file(tmp_path / "keys.toml", lambda old: old.without("bob", NOW))
    assert len(store.reload()) == 1
    assert len(store.ring() or ()) == 0


def test_nothing_that_is_missing_opens_a_server(tmp_path: Path) -> None:
    store, made, path = store_with(tmp_path, 'keys_file = "keys.toml"\n')
    write(path, "")  # names no keys any more
    assert store.reload() == ()
    assert (store.ring() or {}).name_of(made["alice"]) == "alice"  # type: ignore[union-attr, attr-defined]
    change_key_file(tmp_path / "keys.toml", lambda old: old.without("alice", NOW))
    store.reload()
    assert (store.ring() or {}).name_of(made["alice"]) is None  # type: ignore[union-attr, attr-defined]
    (tmp_path / "keys.toml").unlink()
    assert "keys are as they were" in store.reload()[0]
    assert len(store.ring() or ()) == 1
    write(tmp_path / "keys.toml", "")
    (tmp_path / "keys.toml").chmod(0o600)
    assert "keys are as they were" in store.reload()[0]
    assert len(store.ring() or ()) == 1


def test_keys_without_settings_and_two_that_disagree(tmp_path: Path) -> None:
    made = keys(tmp_path / "keys.toml", "alice")
    store = PolicyStore(keys_path=tmp_path / "keys.toml")
    assert (store.ring() or {}).name_of(made["alice"]) == "alice"  # type: ignore[union-attr, attr-defined]
    path = write(tmp_path / "p.toml", 'keys_file = "./keys.toml"\n')
    assert PolicyStore(path=path, keys_path=tmp_path / "keys.toml").ring() is not None
    keys(tmp_path / "others.toml", "bob")
    with pytest.raises(ConfigError, match="keys_file is"):
        PolicyStore(path=path, keys_path=tmp_path / "others.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        PolicyStore(path=write(tmp_path / "q.toml", 'keys_file = "none.toml"\n'))
    assert PolicyStore().ring() is None


def test_a_request_keeps_the_policies_it_began_with(tmp_path: Path) -> None:
    store, _, path = store_with(tmp_path, "[completion_cap]\nmax_tokens = 5\n")
    policies = Policies(store, lambda ids: "")
    before = policies.for_caller(MODEL, "alice")
    assert policies.for_caller(MODEL, "alice") is before, "made once"
    assert policies.for_caller(MODEL, "bob") is not before
    write(path, "[completion_cap]\nmax_tokens = 6\n")
    store.reload()
    after = policies.for_caller(MODEL, "alice")
    assert after is not before
    assert [policy.name for policy in after] == [
        "key_limits",
        "completion_cap",
        "thinking_budget",
        "sampling_defaults",
        "deadlines",
        "loop_abort",
    ]
    assert before[1]._settings == CompletionCapSettings(max_tokens=5)  # type: ignore[attr-defined]
    assert after[1]._settings == CompletionCapSettings(max_tokens=6)  # type: ignore[attr-defined]
    assert policies.settings_for(None, None).images == ImageSettings()


def test_reloading_while_others_ask(tmp_path: Path) -> None:
    """Whoever asks gets one state of the file or another, never parts of two."""
    text = "[completion_cap]\nmax_tokens = {0}\n[loop_abort]\ndata_tokens = {0}\n"
    store, _, path = store_with(tmp_path, text.format(1))
    policies = Policies(store, lambda ids: "")
    stop = threading.Event()
    seen: set[tuple[int | None, int]] = set()

    def ask() -> None:
        while not stop.is_set():
            settings = policies.settings_for(MODEL, "alice")
            seen.add((settings.completion_cap.max_tokens, settings.loop_abort.data_tokens))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2, 14):
        write(path, text.format(number))
        store.reload()
    stop.set()
    for thread in threads:
        thread.join()
    assert all(first == second for first, second in seen)
    assert policies.settings_for(MODEL, "alice").completion_cap.max_tokens == 13


def test_looking_up_costs_nothing(tmp_path: Path) -> None:
    store = PolicyStore()
    policies = Policies(store, lambda ids: "")
    for number in range(1000):
        policies.for_caller(MODEL, f"key{number}")
    start = time.perf_counter()
    for number in range(1000):
        policies.for_caller(MODEL, f"key{number}")
    assert (time.perf_counter() - start) / 1000 < 20e-6
