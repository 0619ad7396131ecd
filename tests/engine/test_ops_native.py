"""The compiled operators against the reference, on operands of many kinds; and that they keep their own promises.

Sums of quantised products are exact in double, so those operators must be equal. For the rest equality is what the
rounding after the sum gives in all but one of some 10^8 values (docs/decisions/0016): fewer are compared here, and the
seed is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import deskfleet_ops
from deskfleet.engine import ops
from deskfleet.engine.ops import native, records, reference
from deskfleet.errors import EngineError
from tests.engine.golden import Harness, golden

BF16 = torch.bfloat16
SETS = [name for name in ("avx512", "avx2", "sse2", "neon") if deskfleet_ops.use_instruction_set(name)]
ROWS = (1, 2, 3, 6, 7, 13, 40)
Case = tuple[Callable[..., object], Callable[..., object], tuple[object, ...], dict[str, object]]


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that this processor has; the best again afterwards."""
    assert deskfleet_ops.use_instruction_set(request.param)
    yield request.param
    deskfleet_ops.use_instruction_set(SETS[0])


def bits(value: object) -> list[Tensor]:
    """Bytes of every tensor of a result."""
    if isinstance(value, Tensor):
        return [value.contiguous().view(torch.uint8)]
    assert isinstance(value, tuple)
    return [part for item in value for part in bits(item)]


def assert_same(name: str, ours: object, theirs: object) -> None:
    for mine, other in zip(bits(ours), bits(theirs), strict=True):
        assert mine.shape == other.shape, name
        assert torch.equal(mine, other), (
            f"{name}: {int((mine != other).sum())} of {mine.numel()} bytes differ"
        )


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 rows of very different sizes, some of them zero."""
    x = torch.randn(*shape) * scale * torch.exp(2 * torch.randn(shape[0], *(1,) * (len(shape) - 1)))
    x[torch.rand(shape) < 0.05] = 0.0
    return x.to(BF16)


def fp8_matrix(outs: int, width: int) -> Tensor:
    codes = torch.randint(0, 256, (outs, width), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    scales = torch.randint(116, 126, (outs // 32, width // 32), dtype=torch.uint8)
    return ops.dequantize_fp8_weight(codes, scales).to(BF16)


def fp4_matrices(count: int, outs: int, width: int) -> ops.Fp4Matrix:
    return ops.Fp4Matrix(
        torch.randint(0, 256, (count, outs, width // 2), dtype=torch.uint8),
        torch.randint(116, 126, (count, outs, width // 32), dtype=torch.uint8),
    )


def both(name: str, *args: object, **options: object) -> Case:
    return getattr(native, name), getattr(reference, name), args, options


def cases(rows: int) -> Iterator[tuple[str, Case]]:
    """Every operator that both have, on operands of `rows` rows."""
    x, narrow, odd = rows_of(rows, 192), rows_of(rows, 64), rows_of(rows, 45)
    matrix, wide, norm = fp8_matrix(96, 192), torch.randn(20, 192), torch.rand(96) + 0.5
    for name in ("linear", "linear_f32", "linear_partial", "quantized_linear", "quantized_linear_partial"):
        yield name, both(name, x, matrix)
    yield "linear of float32", both("linear", x, wide)
    yield "linear of odd rows", both("linear", odd, rows_of(7, 45))
    yield "normed_linear", both("normed_linear", x, matrix, norm, 1e-6)
    yield "rms_norm", both("rms_norm", x, torch.rand(192) + 0.5, 1e-20)
    yield (
        "grouped_linear",
        both("grouped_linear", rows_of(rows, 3, 64), torch.stack([fp8_matrix(32, 64)] * 3)),
    )
    heads, angle = rows_of(rows, 5, 64), torch.randn(rows, 8) * 10
    for inverse in (False, True):
        yield "apply_rope", both("apply_rope", heads, angle.cos(), angle.sin(), inverse=inverse)
    yield "apply_rope of flat rows", both("apply_rope", narrow, angle.cos(), angle.sin())
    for name in ("WINDOW", "ENTRY", "INDEX_KEY"):
        ours, theirs = getattr(native, name), getattr(records, name)
        packed = theirs.pack(narrow)
        yield f"{name}.pack", (ours.pack, theirs.pack, (narrow,), {})
        yield f"{name}.unpack", (ours.unpack, theirs.unpack, (packed,), {})
        index = torch.randint(0, rows, (11,))
        yield f"{name}.unpack_rows", (ours.unpack_rows, theirs.unpack_rows, (packed, index), {})
        yield f"{name}.unpack_joined", (ours.unpack_joined, theirs.unpack_joined, (packed, index, packed), {})
    pools = rows_of(50, 64), rows_of(70, 64)
    lists = torch.randint(-9, 50, (rows, 64)).clamp_min(-1), torch.randint(-70, 70, (rows, 41)).clamp_min(-1)
    sources = list(zip(pools, lists, strict=True))
    yield "sparse_attention", both("sparse_attention", heads, sources, torch.randn(5), 0.125)
    yield "sparse_attention of one", both("sparse_attention", heads, sources[1:], torch.randn(5), 0.125)
    for copies in (4, 3):
        stream, outs = rows_of(rows, copies, 96), (2 + copies) * copies
        weight, base = torch.randn(outs, copies * 96) * 0.05, torch.randn(outs)
        scale, post = torch.rand(3) + 0.3, torch.rand(rows, copies)
        comb, out = torch.rand(rows, copies, copies), rows_of(rows, 96)
        yield "hc_mixes", both("hc_mixes", stream, weight, 1e-20)
        split = {"copies": copies, "iterations": 20, "eps": 1e-6}
        yield "hc_split", both("hc_split", torch.randn(rows, outs), scale, base, **split)
        options = {"norm_eps": 1e-20, "iterations": 20, "eps": 1e-6}
        yield "hc_weights", both("hc_weights", stream, weight, scale, base, **options)
        yield "hc_collapse", both("hc_collapse", stream, post)
        yield "hc_collapse_norm", both("hc_collapse_norm", stream, post, torch.rand(96), 1e-6)
        yield "hc_expand", both("hc_expand", out, stream, post, comb)
        alive = torch.rand(rows) < 0.8
        both_parts = rows_of(rows, (copies + 1) * 96)
        key, value = both_parts[:, : copies * 96].unflatten(1, (copies, 96)), both_parts[:, copies * 96 :]
        gate = torch.randn(copies, 96)
        yield "engram_gate", both("engram_gate", stream, key, value, gate, alive, 1e-20)
    yield "compress_pairs", both("compress_pairs", torch.randn(rows, 2, 44), torch.randn(rows, 2, 44) * 3)
    numbers = torch.sort(torch.randperm(400)[:290]).values
    visible, blocks = torch.randint(1, 401, (rows,)), torch.randint(-1, 50, (rows, 6))
    asked = rows_of(rows, 4, 32), rows_of(rows, 4), rows_of(290, 32), numbers
    for among in (None, blocks):
        yield "index_scores", both("index_scores", *asked, torch.full_like(visible, 400), among, block=8)
    yield "index_scores of what is visible", both("index_scores", *asked, visible, None, block=8)
    scores = reference.index_scores(*asked, visible, None, block=8)
    for count in (1, 64, 500):
        yield "top_positions", both("top_positions", scores, count)
    yield "top_positions with ties", both("top_positions", torch.randint(0, 3, (rows, 90)).float(), 20)
    order = torch.arange(37), torch.randint(0, 291, (rows,))
    yield "candidate_scores", both("candidate_scores", scores, *order, block=8)
    for bias in (torch.rand(16) * 0.1, torch.rand(rows, 16) * 0.1):
        chances = {"num_chosen": 2, "scaling": 1.5, "temperature": 0.9}
        yield "route", both("route", narrow, rows_of(16, 64, scale=0.1), bias, **chances)
    weights, chosen = torch.rand(rows, 2), torch.stack([torch.randperm(6)[:2] for _ in range(rows)])
    for weight in (None, weights[:, 0]):
        gate, up = rows_of(rows, 50, scale=4), rows_of(rows, 50, scale=4)
        yield "expert_activation", both("expert_activation", gate, up, 10.0, weight)
    w13, w2 = fp4_matrices(6, 128, 192), fp4_matrices(6, 192, 64)
    for held in (slice(0, 6), slice(2, 5)):
        options = {"first_expert": held.start, "limit": 10.0}
        yield "routed_experts", both("routed_experts", x, chosen, weights, w13[held], w2[held], **options)
    yield "shared_expert", both("shared_expert", x, fp8_matrix(128, 192), fp8_matrix(192, 64), limit=10.0)
    yield "add_round", both("add_round", torch.randn(rows, 64, dtype=torch.float64), narrow)
    codes = torch.randint(0, 127, (rows, 3, 64), dtype=torch.uint8)
    scales = torch.randint(100, 140, (rows, 3, 2), dtype=torch.uint8)
    yield "decode_fp8_rows", both("decode_fp8_rows", codes, scales)


@torch.inference_mode()
def test_every_operator_equals_the_reference(instruction_set: str) -> None:
    torch.manual_seed(15)
    seen = set()
    for rows in ROWS:
        for name, (ours, theirs, args, options) in cases(rows):
            assert_same(f"{name} of {rows} rows", ours(*args, **options), theirs(*args, **options))
            seen.add(name.partition(" ")[0].partition(".")[0])
    missing = (
        set(native.__all__) - seen - {"RecordFormat", "instruction_set", "fake_quant_fp4_e8m0", "write_rows"}
    )
    assert not missing, f"not compared: {missing}"


@torch.inference_mode()
def test_a_row_is_the_same_in_every_batch() -> None:
    """By construction, not by luck: also where the sum is not exact, to the last bit of a double."""
    torch.manual_seed(16)
    x, weight = rows_of(29, 192), torch.randn(37, 192)
    whole = native.linear_partial(x, weight)
    for start, stop in ((0, 1), (3, 9), (5, 29), (28, 29)):
        assert torch.equal(native.linear_partial(x[start:stop], weight), whole[start:stop])
    for outs in (1, 2, 5, 36):
        assert torch.equal(native.linear_partial(x, weight[:outs].contiguous()), whole[:, :outs])


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 6, 300])
def test_entries_are_picked_once_each(rows: int) -> None:
    """Row numbers of both implementations differ; what they name does not."""
    torch.manual_seed(17)
    pool = records.ENTRY.pack(rows_of(64, 64))
    picks, slots = torch.randint(-3, 24, (rows, 20)).clamp_min(-1), torch.randint(0, 2, (rows,))
    blocks = torch.tensor([[1, 3, 5], [2, 3, 7]], dtype=torch.int32)
    found, places = native.ENTRY.pick(pool, picks, slots, blocks, 8)
    theirs, their_places = records.ENTRY.pick(pool, picks, slots, blocks, 8)
    assert len(found) == len(theirs)
    assert torch.equal(places < 0, picks < 0)
    assert torch.equal(places < 0, their_places < 0)
    there = picks >= 0
    assert torch.equal(found[places[there]], theirs[their_places[there]])


@torch.inference_mode()
def test_rows_are_written_where_they_belong() -> None:
    target, source = torch.zeros(9, 66, dtype=torch.uint8), torch.randint(0, 256, (5, 66), dtype=torch.uint8)
    native.write_rows(target, torch.tensor([7, 0, 3]), source, torch.tensor([4, 1, 1]))
    assert torch.equal(target[[7, 0, 3]], source[[4, 1, 1]])
    assert int(target.count_nonzero(1).ne(0).sum()) == 3


@torch.inference_mode()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A broken number must reach the logits, where it is looked for."""
    torch.manual_seed(18)
    x = rows_of(3, 64)
    x[1, 5] = bad
    stream = torch.stack([x] * 4, 1)
    weights = torch.rand(3, 4), torch.rand(3, 4, 4)
    w13, w2 = fp4_matrices(2, 128, 64), fp4_matrices(2, 64, 64)
    chosen, shares = native.route(x, rows_of(2, 64), torch.zeros(2), num_chosen=2, scaling=1.0)
    index, key = torch.zeros(3, 4, dtype=torch.int64), torch.ones(1, 64, dtype=BF16)
    results = {
        "quantized_linear": native.quantized_linear(x, fp8_matrix(32, 64)),
        "linear": native.linear(x, rows_of(7, 64)),
        "rms_norm": native.rms_norm(x, torch.ones(64), 1e-6),
        "hc_expand": native.hc_expand(x, stream, *weights),
        "hc_weights": native.hc_weights(
            stream,
            torch.randn(24, 256),
            torch.ones(3),
            torch.zeros(24),
            norm_eps=1e-6,
            iterations=20,
            eps=1e-6,
        )[2],
        "routed_experts": native.routed_experts(x, chosen, shares, w13, w2, first_expert=0, limit=10.0),
        "shared_expert": native.shared_expert(x, fp8_matrix(128, 64), fp8_matrix(64, 64), limit=10.0),
        "attention of a query": native.sparse_attention(x[:, None], [(key, index)], torch.zeros(1), 0.1),
        "attention of a key": native.sparse_attention(
            x[[0, 2]][:, None], [(x[1:2], index[:2])], torch.zeros(1), 0.1
        ),
    }
    finite = {name for name, result in results.items() if bool(torch.isfinite(result).all())}
    assert not finite


@torch.inference_mode()
def test_a_whole_model_gives_the_same_bits(harness: Harness) -> None:
    """A prompt in one pass, steps, a batch and drafts: logits and caches, by either implementation."""
    ids = golden("golden/prefill")["len130.input_ids"]
    results = []
    for choice in ("native", "reference"):
        ops.select(choice)
        try:
            parts = [harness.run(harness.segment(ids, 0, 120))[0]]
            parts += [harness.run(harness.segment(ids, p, p + 1))[0] for p in range(120, 124)]
            parts += [harness.run(harness.segment(ids, 124, 130), harness.segment(ids, 0, 9, slot=1))[0]]
            proposal = harness.propose(ids[[5, 6]], [129, 8], [0, 1])
        finally:
            ops.select()
        cached = [*harness.cache.windows, *harness.cache.entries.values(), *harness.cache.index_keys.values()]
        results.append([*parts, proposal.logits, proposal.confidence, *(pages.clone() for pages in cached)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_another_dtype_is_refused() -> None:
    x = torch.zeros(1, 64)
    with pytest.raises(EngineError, match=r"needs torch\.bfloat16, not torch\.float32"):
        native.linear(x, x)
    with pytest.raises(EngineError, match="dense bf16 or float32 weights"):
        native.linear(x.to(BF16), x.double())
    with pytest.raises(EngineError, match="a row of 64 meets a matrix of 32 columns"):
        native.linear(x.to(BF16), x[:, :32].contiguous())


def test_the_choice_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for and got; without a library `auto` computes by the reference and says why, and `native` refuses."""
    try:
        assert str(ops.select("native")) == f"native ({SETS[0]}), asked for native"
        assert ops.linear is native.linear
        assert str(ops.select("reference")) == "reference (plain torch), asked for reference"
        assert ops.linear is reference.linear

        def missing() -> None:
            raise deskfleet_ops.OpsError("libdeskfleet_ops.so is not installed beside deskfleet_ops")

        monkeypatch.setattr(ops, "_load_native", missing)
        selection = ops.select()
        assert (selection.asked, selection.got) == ("auto", "reference")
        assert selection.detail == (
            "many times slower, because libdeskfleet_ops.so is not installed beside deskfleet_ops"
        )
        with pytest.raises(EngineError, match="not installed") as refusal:
            ops.select("native")
        assert refusal.value.hint == "install deskfleet-ops from a wheel, or with a C++ compiler"
    finally:
        monkeypatch.undo()
        ops.select()
