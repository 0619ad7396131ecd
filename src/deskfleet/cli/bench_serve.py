"""`deskfleet bench serve`: measures an endpoint, shows each batch as it comes, and the table at the end."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from deskfleet.bench.load.caveats import REFUSALS, Policy
from deskfleet.bench.load.record import Condition, LoadResult, Part
from deskfleet.bench.load.suite import LoadSuite, read_requests
from deskfleet.bench.provenance import Provenance
from deskfleet.cli.bench_output import keep, print_rows
from deskfleet.cli.flags import HOST, PORT, Json, Speculate, default_of
from deskfleet.cli.terminal import parse_counts, print_json, say
from deskfleet.errors import ConfigError
from deskfleet.model.embedded import POCKET, locate

if TYPE_CHECKING:
    from deskfleet.bench.load.record import Batch

_D: dict[str, Any] = {
    name: default_of(LoadSuite, name)
    for name in LoadSuite.__dataclass_fields__
    if name not in ("extra_body", "policy", "conditions")
}
_OWN = ("-c", "import sys; from deskfleet.cli import main; sys.exit(main())")
_QUICK: dict[str, tuple[str | None, Any]] = {
    "kinds": ("prompts", ("prose", "json")),
    "concurrency": ("concurrency", (1, 4)),
    "num_tokens": ("tokens", 32),
    "rounds": ("rounds", 2),
    "ladder": ("ladder", (256, 1024)),
    "mixed_s": ("seconds", 10.0),
    "mixed_context": (None, (0, 256)),
}
"""What --quick sets, each with the flag that goes before it."""


def _list(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


def serve(
    context_: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|CHECKPOINT",
            help=f"A server's address, or a directory to serve meanwhile, or {POCKET}.",
        ),
    ] = f"http://{HOST}:{PORT}",
    parts: Annotated[
        str, typer.Option("--parts", metavar="P,P,...", help=f"Any of {_list(get_args(Part))}.")
    ] = _list(_D["parts"]),
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="K,K,...", help="Kinds of prompts to decode after.")
    ] = _list(_D["kinds"]),
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,N,...", help="Streams at the same time.")
    ] = _list(_D["concurrency"]),
    context: Annotated[
        str, typer.Option("--context", metavar="N,N,...", help="Tokens of text to read before decoding.")
    ] = _list(_D["context"]),
    sampling: Annotated[
        str, typer.Option("--sampling", metavar="S,S", help="greedy, sampled, or both.")
    ] = _list(_D["samplings"]),
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="max_tokens of each answer.")] = _D[
        "num_tokens"
    ],
    ladder: Annotated[
        str, typer.Option("--ladder", metavar="N,N,...", help="Lengths of cold prompts to read.")
    ] = _list(_D["ladder"]),
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", help="Rounds that count, after one of warm-up.")
    ] = _D["rounds"],
    rate: Annotated[
        float, typer.Option("--rate", metavar="R", help="Mixed load: requests per second, Poisson.")
    ] = _D["rate"],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="Mixed load: for how long.")] = _D[
        "mixed_s"
    ],
    effort: Annotated[
        str, typer.Option("--effort", metavar="E", help="off, or a reasoning effort of 1 to 100.")
    ] = "off",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers run on to max_tokens, past their end.")
    ] = _D["ignore_eos"],
    quick: Annotated[bool, typer.Option("--quick", help="A minute or so: fewer of everything.")] = False,
    filler: Annotated[
        bool, typer.Option("--filler", help="Prefill one word over and over. Inflated, and labelled so.")
    ] = _D["filler"],
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text to read. [default: Python's own sources]"),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="FILE", help="Decode after these: a JSON body a line."),
    ] = None,
    extra_body: Annotated[
        str,
        typer.Option(
            "--extra-body", metavar="JSON", help="More fields of every request; null takes one out."
        ),
    ] = "{}",
    condition: Annotated[
        list[str] | None,
        typer.Option(
            "--condition", metavar="NAME=VALUE", help="A fact of the set-up that the server does not tell."
        ),
    ] = None,
    allow: Annotated[
        str, typer.Option("--allow", metavar="K,K,...", help=f"Label, not refuse: {', '.join(REFUSALS)}.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse whatever would be labelled.")] = False,
    cached_allowed: Annotated[
        int,
        typer.Option("--cached-allowed", metavar="N", help="Cached tokens a cold prompt may have."),
    ] = _D["num_cached_allowed"],
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Which tasks and arrivals.")] = _D["seed"],
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="File with the server's API key.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Ranks, when a CHECKPOINT is served. [default: 1]")
    ] = None,
    speculate: Speculate = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table in llama-benchy's columns.")
    ] = False,
    vllm_json: Annotated[
        Path | None,
        typer.Option("--vllm-json", metavar="DIR", help="Also write a file per row in vLLM's fields there."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep the result in this new file.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out-dir", metavar="DIR", help="Keep it there, named by date and suite.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Decode, prefill and mixed load of any OpenAI-compatible endpoint.

    Tokens are the server's usage, checked against its own counters. What would mislead is refused, or labelled. Exit
    code 1 when a row was refused.
    """
    suite = LoadSuite(
        parts=tuple(parts.split(",")),  # type: ignore[arg-type]  # checked there
        kinds=tuple(prompts.split(",")),
        concurrency=parse_counts(concurrency, "--concurrency"),
        context=parse_counts(context, "--context"),
        samplings=tuple(sampling.split(",")),
        num_tokens=tokens,
        rounds=rounds,
        ladder=parse_counts(ladder, "--ladder"),
        rate=rate,
        mixed_s=seconds,
        effort=None if effort == "off" else parse_counts(effort, "--effort")[0],
        ignore_eos=ignore_eos,
        filler=filler,
        num_cached_allowed=cached_allowed,
        extra_body=_object(extra_body, "--extra-body"),
        requests=() if requests is None else read_requests(requests),
        text=text,
        seed=seed,
        policy=Policy(frozenset(allow.split(",") if allow else ()), strict),
        conditions=_conditions(condition or []),
    )
    if quick:
        suite = replace(
            suite,
            **{
                name: value
                for name, (flag, value) in _QUICK.items()
                if flag is None or not _was_given(context_, flag)
            },
        )
    command = shlex.join(["deskfleet", *sys.argv[1:]])
    provenance = Provenance.capture(command)
    result = _measure(target, suite, provenance, key_file=key_file, tp=tp, speculate=speculate)
    keep(result, out, out_dir)
    if vllm_json is not None:
        _write_vllm(result, vllm_json)
    _show(result, as_json=as_json, markdown=markdown)
    return 1 if result.refusals() else 0


def _was_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _measure(
    target: str,
    suite: LoadSuite,
    provenance: Provenance,
    *,
    key_file: Path | None,
    tp: int | None,
    speculate: str,
) -> LoadResult:
    from deskfleet.bench.load.run import measure_load
    from deskfleet.bench.load.server_process import running_server

    declared: dict[str, Condition] = {}
    with ExitStack() as stack:
        if target.startswith(("http://", "https://")):
            if tp is not None or speculate:
                raise ConfigError(f"how the model is run is decided by the server at {target}")
            url = target
        else:
            checkpoint = locate(target)
            declared = {"checkpoint": checkpoint.name, "tp": tp or 1}
            flags = ["--tp", str(tp or 1), *(["--speculate", speculate] if speculate else [])]
            argv = (sys.executable, *_OWN, "serve", str(checkpoint), "--port", "0", "--json", *flags)
            url = stack.enter_context(running_server(argv))["url"]
        return asyncio.run(
            measure_load(url, suite, provenance, key=_key(key_file), declared=declared, on_batch=_say_batch)
        )


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {error}") from error


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} is {text}, not an object")
    return found


def _conditions(pairs: list[str]) -> dict[str, Condition]:
    """Return `name=value` pairs; a value that is a JSON number or boolean is one."""
    found: dict[str, Condition] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--condition {pair!r} is not NAME=VALUE", hint="e.g. --condition mtu=9000")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        found[name] = parsed if isinstance(parsed, str | int | float | bool) else value
    return found


def _say_batch(batch: Batch) -> None:
    which = f"round {batch.round}" if batch.round else "warm-up"
    if batch.refusals:
        said = f"refused, {batch.refusals[0].kind}: {batch.refusals[0].text}"
    elif batch.setup.part == "prefill" and batch.prefill_tok_s is not None:
        said = f"{batch.answered[0].num_prompt_tokens:,} tokens at {batch.prefill_tok_s:,.0f} tok/s"
    elif batch.aggregate_tok_s is not None:
        said = f"{batch.num_tokens:,} tokens, {batch.aggregate_tok_s:,.1f} tok/s aggregate"
    else:
        said = f"{batch.num_tokens:,} tokens"
    say(f"{which}: {batch.setup.title}: {said} ({batch.wall_s:.1f} s)")


def _write_vllm(result: LoadResult, directory: Path) -> None:
    from deskfleet.bench.load.vllm_json import vllm_objects
    from deskfleet.bench.result import write_new

    for row in vllm_objects(result):
        name = "".join(c if c.isalnum() else "-" for c in row["label"]).strip("-")
        write_new(directory / f"{name}.json", row)
    say(f"wrote {directory}/*.json")


def _show(result: LoadResult, *, as_json: bool, markdown: bool) -> None:
    from deskfleet.bench.load.summary import as_json as summary
    from deskfleet.bench.load.tables import (
        RATES_HEAD,
        TIMES_HEAD,
        benchy_table,
        footnotes,
        rate_rows,
        time_rows,
    )

    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(result), "summary": summary(result)})
    elif markdown:
        print(benchy_table(result))
    else:
        print_rows(list(RATES_HEAD), rate_rows(result), first_left=True)
        print()
        print_rows(list(TIMES_HEAD), time_rows(result), first_left=True)
        print()
        for line in footnotes(result):
            print(line)


__all__ = ["serve"]
