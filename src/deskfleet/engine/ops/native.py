"""The operators on a CPU, compiled: `reference`'s functions over the library of `deskfleet_ops`.

Owns nothing but the step from tensors to addresses. Roundings are `reference`'s; sums have one order per row, fixed by
the row's length, so results depend neither on the batch nor on the processor (docs/decisions/0016). Importing this
module raises ImportError where the library is missing. A tensor of another dtype than the contract's is refused: bytes
would be read as something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import deskfleet_ops
from deskfleet.engine.ops.quant import Fp4Matrix
from deskfleet.errors import EngineError
from deskfleet_ops import instruction_set

_library = deskfleet_ops.library()
_linear = _library.df_linear
_normed_linear = _library.df_normed_linear
_rms_norm = _library.df_rms_norm
_rope = _library.df_rope
_pack = _library.df_pack
_unpack = _library.df_unpack
_pick_entries = _library.df_pick_entries
_decode_fp8 = _library.df_decode_fp8
_scatter = _library.df_scatter
_sparse_attention = _library.df_sparse_attention
_hc_mixes = _library.df_hc_mixes
_hc_split = _library.df_hc_split
_hc_weights = _library.df_hc_weights
_hc_collapse = _library.df_hc_collapse
_hc_collapse_norm = _library.df_hc_collapse_norm
_hc_expand = _library.df_hc_expand
_compress_pairs = _library.df_compress_pairs
_index_scores = _library.df_index_scores
_candidate_scores = _library.df_candidate_scores
_top_positions = _library.df_top_positions
_route = _library.df_route
_expert_activation = _library.df_expert_activation
_routed_experts = _library.df_routed_experts
_shared_expert = _library.df_shared_expert
_add_round = _library.df_add_round
_engram_gate = _library.df_engram_gate

_empty = torch.empty
_empty_like = torch.empty_like
_BF16, _F32, _F64 = torch.bfloat16, torch.float32, torch.float64
_I64, _I32, _U8 = torch.int64, torch.int32, torch.uint8
_TYPES = {_BF16: deskfleet_ops.BF16, _F32: deskfleet_ops.F32, _F64: deskfleet_ops.F64}


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` as the library reads it."""
    if tensor.dtype is not dtype:
        raise EngineError(f"a native operator needs {dtype}, not {tensor.dtype}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _row_dense(tensor: Tensor, width: int) -> tuple[Tensor, int]:
    """A bf16 tensor whose rows of `width` elements are dense, and how far apart they are."""
    if tensor.dtype is _BF16 and tensor[0].is_contiguous():
        return tensor, tensor.stride(0)
    return _dense(tensor, _BF16), width


def _weight_type(weight: Tensor) -> int:
    """What the library calls a matrix's dtype; it must be dense."""
    if weight.dtype is _F64 or not weight.is_contiguous():
        raise EngineError(f"a native operator needs dense bf16 or float32 weights, not {weight.dtype}")
    return _TYPES[weight.dtype]


def _linear_as(x: Tensor, weight: Tensor, dtype: torch.dtype, *, quantize: bool) -> Tensor:
    x = _dense(x, _BF16)
    outs, width = weight.shape
    if x.shape[-1] != width:
        raise EngineError(f"a row of {x.shape[-1]} meets a matrix of {width} columns")
    out = _empty((*x.shape[:-1], outs), dtype=dtype)
    rows = x.numel() // width
    _linear(
        x.data_ptr(), rows, 1, width, weight.data_ptr(), _weight_type(weight), outs, quantize, out.data_ptr(),
        _TYPES[dtype],
    )  # fmt: skip
    return out


def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.linear_partial`."""
    return _linear_as(x, weight, _F64, quantize=False)


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.linear_f32`."""
    return _linear_as(x, weight, _F32, quantize=False)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.linear`."""
    return _linear_as(x, weight, _BF16, quantize=False)


def quantized_linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.quantized_linear_partial`."""
    return _linear_as(x, weight, _F64, quantize=True)


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.quantized_linear`."""
    return _linear_as(x, weight, _BF16, quantize=True)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `reference.grouped_linear`."""
    x = _dense(x, _BF16)
    rows, groups, width = x.shape
    outs = weight.shape[1]
    out = _empty((rows, groups, outs), dtype=_BF16)
    _linear(
        x.data_ptr(), rows, groups, width, weight.data_ptr(), _weight_type(weight), outs, False, out.data_ptr(),
        deskfleet_ops.BF16,
    )  # fmt: skip
    return out


def normed_linear(x: Tensor, weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `reference.normed_linear`."""
    x, weight, norm = _dense(x, _BF16), _dense(weight, _BF16), _dense(norm, _F32)
    (rows, width), outs = x.shape, weight.shape[0]
    out = _empty((rows, outs), dtype=_BF16)
    _normed_linear(x.data_ptr(), rows, width, weight.data_ptr(), outs, norm.data_ptr(), eps, out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    x, weight = _dense(x, _BF16), _dense(weight, _F32)
    width = x.shape[-1]
    out = _empty_like(x)
    _rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // width, width, out.data_ptr())
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """As `reference.apply_rope`."""
    x, cos, sin = _dense(x, _BF16), _dense(cos, _F32), _dense(sin, _F32)
    rows, width = x.shape[0], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = _empty_like(x)
    _rope(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        inverse,
        rows,
        heads,
        width,
        cos.shape[1],
        out.data_ptr(),
    )
    return out


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """As `records.RecordFormat`; `kind` is the library's number of it."""

    kind: int
    codes_per_byte: int
    block: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` elements."""
        return width // self.codes_per_byte + width // self.block

    def pack(self, x: Tensor) -> Tensor:
        """bf16 [..., D] -> uint8 [..., row_bytes(D)]."""
        x = _dense(x, _BF16)
        width = x.shape[-1]
        out = _empty((*x.shape[:-1], self.row_bytes(width)), dtype=_U8)
        _pack(self.kind, x.data_ptr(), x.numel() // width, width, out.data_ptr())
        return out

    def unpack(self, records: Tensor) -> Tensor:
        """uint8 [..., row_bytes(D)] -> bf16 [..., D]."""
        records = _dense(records, _U8)
        num_bytes = records.shape[-1]
        width = self._width(num_bytes)
        out = _empty((*records.shape[:-1], width), dtype=_BF16)
        _unpack(self.kind, records.data_ptr(), None, records.numel() // num_bytes, width, out.data_ptr())
        return out

    def unpack_rows(self, records: Tensor, index: Tensor) -> Tensor:
        """uint8 [R, row_bytes(D)], int64 [N] -> bf16 [N, D]: those rows."""
        records, index = _dense(records, _U8), _dense(index, _I64)
        width = self._width(records.shape[1])
        out = _empty((len(index), width), dtype=_BF16)
        _unpack(self.kind, records.data_ptr(), index.data_ptr(), len(index), width, out.data_ptr())
        return out

    def unpack_joined(self, pages: Tensor, index: Tensor, records: Tensor) -> Tensor:
        """As `records.RecordFormat.unpack_joined`."""
        pages, index, records = _dense(pages, _U8), _dense(index, _I64), _dense(records, _U8)
        width, num_old, num_new = self._width(pages.shape[1]), len(index), len(records)
        out = _empty((num_old + num_new, width), dtype=_BF16)
        at = out.data_ptr()
        _unpack(self.kind, pages.data_ptr(), index.data_ptr(), num_old, width, at)
        _unpack(self.kind, records.data_ptr(), None, num_new, width, at + num_old * width * 2)
        return out

    def pick(
        self, records: Tensor, picks: Tensor, slots: Tensor, blocks: Tensor, per_block: int
    ) -> tuple[Tensor, Tensor]:
        """As `records.RecordFormat.pick`."""
        records, picks = _dense(records, _U8), _dense(picks, _I64)
        slots, blocks = _dense(slots, _I64), _dense(blocks, _I32)
        rows, length = picks.shape
        width = self._width(records.shape[1])
        out, places = _empty((rows * length, width), dtype=_BF16), _empty_like(picks)
        found = _pick_entries(
            self.kind, records.data_ptr(), picks.data_ptr(), slots.data_ptr(), rows, length, blocks.data_ptr(),
            blocks.shape[1], per_block, width, out.data_ptr(), places.data_ptr(),
        )  # fmt: skip
        return out[:found], places

    def _width(self, num_bytes: int) -> int:
        return num_bytes * self.codes_per_byte * self.block // (self.block + self.codes_per_byte)


WINDOW = RecordFormat(deskfleet_ops.WINDOW, 1, 32)
ENTRY = RecordFormat(deskfleet_ops.ENTRY, 2, 16)
INDEX_KEY = RecordFormat(deskfleet_ops.INDEX_KEY, 2, 32)


def fake_quant_fp4_e8m0(x: Tensor) -> Tensor:
    """As `quant.fake_quant_fp4_e8m0`."""
    return INDEX_KEY.unpack(INDEX_KEY.pack(x))


def decode_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """As `reference.decode_fp8_rows`."""
    codes, scales = _dense(codes, _U8), _dense(scales, _U8)
    out = _empty(codes.shape, dtype=_BF16)
    _decode_fp8(codes.data_ptr(), scales.data_ptr(), codes.numel(), out.data_ptr())
    return out


def write_rows(target: Tensor, places: Tensor, source: Tensor, rows: Tensor) -> None:
    """As `reference.write_rows`."""
    if not target.is_contiguous() or target.dtype is not source.dtype:
        raise EngineError(f"rows of {source.dtype} cannot be written into {target.dtype}")
    source, places, rows = _dense(source, source.dtype), _dense(places, _I64), _dense(rows, _I64)
    num_bytes = target.shape[1] * target.element_size()
    _scatter(target.data_ptr(), places.data_ptr(), source.data_ptr(), rows.data_ptr(), len(places), num_bytes)


def sparse_attention(
    query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], sink: Tensor, scale: float
) -> Tensor:
    """As `reference.sparse_attention`, of one source or two."""
    if not 1 <= len(sources) <= 2:
        raise EngineError(f"native attention reads one or two sources, not {len(sources)}")
    query, sink = _dense(query, _BF16), _dense(sink, _F32)
    rows, heads, width = query.shape
    first, first_index = _dense(sources[0][0], _BF16), _dense(sources[0][1], _I64)
    second, second_index, second_length = first, first_index, 0
    if len(sources) == 2:
        second, second_index = _dense(sources[1][0], _BF16), _dense(sources[1][1], _I64)
        second_length = second_index.shape[1]
    out = _empty_like(query)
    _sparse_attention(
        query.data_ptr(), rows, heads, width, first.data_ptr(), first_index.data_ptr(), first_index.shape[1],
        second.data_ptr(), second_index.data_ptr(), second_length, sink.data_ptr(), scale, out.data_ptr(),
    )  # fmt: skip
    return out


def hc_mixes(stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.hc_mixes`."""
    stream, weight = _dense(stream, _BF16), _dense(weight, _F32)
    rows, copies, width = stream.shape
    out = _empty((rows, weight.shape[0]), dtype=_F32)
    _hc_mixes(stream.data_ptr(), weight.data_ptr(), eps, rows, copies, width, out.data_ptr())
    return out


def hc_split(
    mixes: Tensor, scale: Tensor, base: Tensor, *, copies: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.hc_split`."""
    mixes, scale, base = _dense(mixes, _F32), _dense(scale, _F32), _dense(base, _F32)
    rows = mixes.shape[0]
    pre, post = _empty((rows, copies), dtype=_F32), _empty((rows, copies), dtype=_F32)
    comb = _empty((rows, copies, copies), dtype=_F32)
    _hc_split(
        mixes.data_ptr(), scale.data_ptr(), base.data_ptr(), rows, copies, iterations, eps, pre.data_ptr(),
        post.data_ptr(), comb.data_ptr(),
    )  # fmt: skip
    return pre, post, comb


def hc_weights(
    stream: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.hc_weights`."""
    stream, weight = _dense(stream, _BF16), _dense(weight, _F32)
    scale, base = _dense(scale, _F32), _dense(base, _F32)
    rows, copies, width = stream.shape
    pre, post = _empty((rows, copies), dtype=_F32), _empty((rows, copies), dtype=_F32)
    comb = _empty((rows, copies, copies), dtype=_F32)
    _hc_weights(
        stream.data_ptr(), weight.data_ptr(), norm_eps, scale.data_ptr(), base.data_ptr(), rows, copies, width,
        iterations, eps, pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
    )  # fmt: skip
    return pre, post, comb


def hc_collapse_norm(stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `reference.hc_collapse_norm`."""
    stream, pre, norm = _dense(stream, _BF16), _dense(pre, _F32), _dense(norm, _F32)
    rows, copies, width = stream.shape
    out = _empty((rows, width), dtype=_BF16)
    _hc_collapse_norm(
        stream.data_ptr(), pre.data_ptr(), norm.data_ptr(), eps, rows, copies, width, out.data_ptr()
    )
    return out


def hc_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """As `reference.hc_collapse`."""
    stream, pre = _dense(stream, _BF16), _dense(pre, _F32)
    rows, copies, width = stream.shape
    out = _empty((rows, width), dtype=_BF16)
    _hc_collapse(stream.data_ptr(), pre.data_ptr(), rows, copies, width, out.data_ptr())
    return out


def hc_expand(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `reference.hc_expand`."""
    output, stream = _dense(output, _BF16), _dense(stream, _BF16)
    post, comb = _dense(post, _F32), _dense(comb, _F32)
    rows, copies, width = stream.shape
    out = _empty_like(stream)
    _hc_expand(
        output.data_ptr(),
        stream.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        rows,
        copies,
        width,
        out.data_ptr(),
    )
    return out


def compress_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """As `reference.compress_pairs`."""
    values, gates = _dense(values, _F32), _dense(gates, _F32)
    groups, ratio, width = values.shape
    out = _empty((groups, width), dtype=_BF16)
    _compress_pairs(values.data_ptr(), gates.data_ptr(), groups, ratio, width, out.data_ptr())
    return out


def index_scores(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    numbers: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    *,
    block: int,
) -> Tensor:
    """As `reference.index_scores`."""
    query, weights, keys = _dense(query, _BF16), _dense(weights, _BF16), _dense(keys, _BF16)
    numbers, visible = _dense(numbers, _I64), _dense(visible, _I64)
    rows, heads, width = query.shape
    out = _empty((rows, len(keys)), dtype=_BF16)
    blocks_at, num_blocks = None, 0
    if blocks is not None:
        blocks = _dense(blocks, _I64)
        blocks_at, num_blocks = blocks.data_ptr(), blocks.shape[1]
    _index_scores(
        query.data_ptr(), weights.data_ptr(), keys.data_ptr(), numbers.data_ptr(), visible.data_ptr(), blocks_at,
        num_blocks, block, rows, heads, width, len(keys), out.data_ptr(),
    )  # fmt: skip
    return out


def candidate_scores(scores: Tensor, block_numbers: Tensor, num_visible: Tensor, *, block: int) -> Tensor:
    """As `reference.candidate_scores`."""
    scores = _dense(scores, _F32 if scores.dtype is _F32 else _BF16)
    block_numbers = _dense(block_numbers, _I64)
    num_visible = _dense(num_visible, _I64)
    rows, length = scores.shape
    out = _empty((rows, len(block_numbers)), dtype=_F32)
    _candidate_scores(
        scores.data_ptr(), _TYPES[scores.dtype], rows, length, block, block_numbers.data_ptr(), len(block_numbers),
        num_visible.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def top_positions(scores: Tensor, count: int) -> Tensor:
    """As `reference.top_positions`."""
    scores = _dense(scores, _F32 if scores.dtype is _F32 else _BF16)
    rows, length = scores.shape
    count = min(count, length)
    out = _empty((rows, count), dtype=_I64)
    _top_positions(scores.data_ptr(), _TYPES[scores.dtype], rows, length, count, out.data_ptr())
    return out


def route(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_chosen: int, scaling: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `reference.route`."""
    x, bias = _dense(x, _BF16), _dense(bias, _F32)
    (rows, width), experts = x.shape, weight.shape[0]
    chosen, weights = _empty((rows, num_chosen), dtype=_I64), _empty((rows, num_chosen), dtype=_F32)
    _route(
        x.data_ptr(), weight.data_ptr(), _weight_type(weight), bias.data_ptr(), 0 if bias.dim() == 1 else experts,
        rows, width, experts, num_chosen, scaling, temperature, chosen.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return chosen, weights


def expert_activation(gate: Tensor, up: Tensor, limit: float, route_weight: Tensor | None) -> Tensor:
    """As `reference.expert_activation`."""
    gate, up = _dense(gate, _BF16), _dense(up, _BF16)
    weights = None if route_weight is None else _dense(route_weight, _F32)
    rows, width = gate.shape
    out = _empty(gate.shape, dtype=_BF16)
    at = None if weights is None else weights.data_ptr()
    _expert_activation(gate.data_ptr(), width, up.data_ptr(), width, limit, at, rows, width, out.data_ptr())
    return out


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Fp4Matrix,
    w2: Fp4Matrix,
    *,
    first_expert: int,
    limit: float,
) -> Tensor:
    """As `reference.routed_experts`."""
    x, chosen, weights = _dense(x, _BF16), _dense(chosen, _I64), _dense(weights, _F32)
    both, both_scales = _dense(w13.codes, _U8), _dense(w13.scales, _U8)
    down, down_scales = _dense(w2.codes, _U8), _dense(w2.scales, _U8)
    (rows, width), (experts, _, packed) = x.shape, down.shape
    out = _empty((rows, width), dtype=_F64)
    _routed_experts(
        x.data_ptr(), chosen.data_ptr(), weights.data_ptr(), both.data_ptr(), both_scales.data_ptr(),
        down.data_ptr(), down_scales.data_ptr(), rows, width, 2 * packed, chosen.shape[1], first_expert, experts,
        limit, out.data_ptr(),
    )  # fmt: skip
    return out


def shared_expert(x: Tensor, w13: Tensor, w2: Tensor, *, limit: float) -> Tensor:
    """As `reference.shared_expert`."""
    x, w13, w2 = _dense(x, _BF16), _dense(w13, _BF16), _dense(w2, _BF16)
    (rows, width), inner = x.shape, w2.shape[1]
    out = _empty((rows, width), dtype=_BF16)
    _shared_expert(x.data_ptr(), w13.data_ptr(), w2.data_ptr(), rows, width, inner, limit, out.data_ptr())
    return out


def add_round(total: Tensor, added: Tensor) -> Tensor:
    """As `reference.add_round`."""
    total, added = _dense(total, _F64), _dense(added, _BF16)
    out = _empty_like(added)
    _add_round(total.data_ptr(), added.data_ptr(), added.numel(), out.data_ptr())
    return out


def engram_gate(
    stream: Tensor, key: Tensor, value: Tensor, weight: Tensor, alive: Tensor, eps: float
) -> Tensor:
    """As `reference.engram_gate`."""
    stream, weight = _dense(stream, _BF16), _dense(weight, _F32)
    alive = _dense(alive, torch.bool)
    rows, copies, width = stream.shape
    key, key_stride = _row_dense(key, copies * width)
    value, value_stride = _row_dense(value, width)
    out = _empty_like(stream)
    _engram_gate(
        stream.data_ptr(), key.data_ptr(), key_stride, value.data_ptr(), value_stride, weight.data_ptr(),
        alive.data_ptr(), eps, rows, copies, width, out.data_ptr(),
    )  # fmt: skip
    return out


__all__ = [
    "ENTRY",
    "INDEX_KEY",
    "WINDOW",
    "RecordFormat",
    "add_round",
    "apply_rope",
    "candidate_scores",
    "compress_pairs",
    "decode_fp8_rows",
    "engram_gate",
    "expert_activation",
    "fake_quant_fp4_e8m0",
    "grouped_linear",
    "hc_collapse",
    "hc_collapse_norm",
    "hc_expand",
    "hc_mixes",
    "hc_split",
    "hc_weights",
    "index_scores",
    "instruction_set",
    "linear",
    "linear_f32",
    "linear_partial",
    "normed_linear",
    "quantized_linear",
    "quantized_linear_partial",
    "rms_norm",
    "route",
    "routed_experts",
    "shared_expert",
    "sparse_attention",
    "top_positions",
    "write_rows",
]
