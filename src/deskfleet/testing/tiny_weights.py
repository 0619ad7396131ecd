"""Random weights in the published number formats, sized so that a forward pass stays finite and lively.

Owns the numbers of a tiny checkpoint: which spread each kind of tensor gets, how it is cut into codes and
scales, and the habits that make its text vary. Knows nothing of files. Every tensor has its own generator,
seeded by seed and name, and all arithmetic up to the codes is exact, so the same seed gives the same bytes on
every platform.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from deskfleet.model.names import TensorSpec
from deskfleet.testing.tiny_habits import Habits

_E4M3_SPREAD = 24.0  # standard deviation of the codes' values; the largest drawn is 3.5 of these, below 448
_E2M1_SPREAD = 2.0  # of values up to 6
_OCTAVES = (-1, 0, 1)  # scales vary over three, so that a shifted or transposed grid of scales shows
_OCTAVE_RMS = math.sqrt(sum(4.0**octave for octave in _OCTAVES) / len(_OCTAVES))

_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)

_SPREADS: tuple[tuple[str, float, float], ...] = (
    # (pattern, mean, standard deviation) of tensors that are stored as they are; the first match decides
    (r"embed\.weight", 0.0, 0.5),
    (r"image_(start|end|newline)", 0.0, 0.5),
    (r".*norm\d?\.weight", 1.0, 0.1),
    (r".*\.engram\.[qk]_weight", 1.0, 0.2),
    (r".*\.hc_(attn|ffn)_base", 0.0, 0.6),
    (r".*\.hc_(attn|ffn)_scale", 0.7, 0.15),
    (r".*\.attn_sink", 0.0, 1.0),
    (r".*\.gate\.bias(_vl)?", 0.0, 0.15),
    (r".*\.bias", 0.0, 0.05),
    (r".*\.markov_head\.embed\.weight", 0.0, 1.0),
)
_GAINS: tuple[tuple[str, float], ...] = (
    # (pattern, gain): spread of a matrix's outputs for inputs of unit spread. What writes into the stream is
    # kept small against it, so that a rounding difference that flips an expert or a pick moves logits little.
    (r".*\.attn\.wo_b", 0.4),
    (r".*\.ffn\.(experts\.\d+|shared_experts)\.w2", 0.1),
    (r".*\.engram\.embed", 0.15),
    (r".*\.compressor\.wgate", 1.5),
    (r"vision\.blocks\.\d+\.(attn\.wo|mlp\.w2)", 0.5),
    (r".*", 1.0),
)


def random_tensors(
    names: Iterable[str], specs: Mapping[str, TensorSpec], *, seed: int, habits: Habits
) -> dict[str, bytes]:
    """Return the bytes of each tensor of `names`, row-major, little-endian.

    `specs` describes the whole checkpoint, because a head is fitted to an embedding of another shard. A
    `.scale` is made together with its `.weight`, so `names` must hold both or neither.
    """
    made: dict[str, bytes] = {}
    for name in names:
        spec = specs[name]
        if name.endswith(".scale"):
            continue
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if spec.dtype in ("F8_E4M3", "I8"):
            made |= _quantised(name, spec, scale_name, specs[scale_name], seed)
        elif spec.dtype == "BF16":
            made[name] = _to_bf16(_bf16_values(name, specs, seed, habits)).tobytes()
        else:
            made[name] = _stored(name, spec, seed).astype("<f4").tobytes()
    return made


def _bf16_values(
    name: str, specs: Mapping[str, TensorSpec], seed: int, habits: Habits
) -> NDArray[np.float32]:
    """Return what a BF16 tensor holds; the two heads are fitted to the habits, all else is drawn."""
    if name == "head.weight":
        embed_name, boost = "embed.weight", 12.0
    elif name.endswith(".markov_head.head.weight"):
        embed_name, boost = name.replace(".head.weight", ".embed.weight"), 12.0
    else:
        return _stored(name, specs[name], seed)
    noise = _normal(name, specs[name].shape, seed) * np.float32(0.08)
    return habits.fit_head(_stored(embed_name, specs[embed_name], seed), noise, boost=boost)


def _stored(name: str, spec: TensorSpec, seed: int) -> NDArray[np.float32]:
    """Draw a tensor that is stored unquantised."""
    normal = _normal(name, spec.shape, seed)
    for pattern, mean, spread in _SPREADS:
        if re.fullmatch(pattern, name):
            return normal * np.float32(spread) + np.float32(mean)
    return normal * np.float32(_gain(name.removesuffix(".weight")) / math.sqrt(spec.shape[-1]))


def _quantised(
    name: str, spec: TensorSpec, scale_name: str, scale_spec: TensorSpec, seed: int
) -> dict[str, bytes]:
    """Draw codes and scales: a scale's octave is random, and the codes' spread is the same under each."""
    packed = spec.dtype == "I8"
    rows, columns = spec.shape[0], spec.shape[1] * (2 if packed else 1)
    # A row of an Engram table is not a row of a matrix: nothing is summed over it.
    fan_in = 1 if re.fullmatch(r".*\.engram\.embed\.weight", name) else columns
    spread = _gain(name.removesuffix(".weight")) / math.sqrt(fan_in) / _OCTAVE_RMS
    code_spread = _E2M1_SPREAD if packed else _E4M3_SPREAD
    fraction, exponent = math.frexp(spread / code_spread)  # fraction in 0.5..1: exponent - 1 rounds down
    octaves = _random(scale_name, scale_spec.shape, seed) % np.uint64(len(_OCTAVES))
    scales = (octaves.astype(np.int64) + min(_OCTAVES) + exponent - 1 + 127).astype(np.uint8)
    values = _normal(name, (rows, columns), seed) * np.float32(code_spread * fraction * 2)
    codes = _to_e2m1(values) if packed else _to_e4m3(values)
    if packed:
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))  # the even column lies in the low nibble
    return {name: codes.tobytes(), scale_name: scales.tobytes()}


def _gain(name: str) -> float:
    return next(gain for pattern, gain in _GAINS if re.fullmatch(pattern, name))


def _random(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint64]:
    """Return uint64 of `shape`, a pure function of seed, name and count.

    Raw output of the bit generator, because only that is promised to be the same in every release of numpy.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.PCG64(int.from_bytes(digest[:16], "little"))
    raw: NDArray[np.uint64] = generator.random_raw(math.prod(shape)).reshape(shape)
    return raw


def _normal(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return float32 of `shape`, nearly normal with spread 1 and at most 3.47: sums of four 16-bit integers.

    Integer sums are exact, unlike a logarithm, whose last bit depends on the platform.
    """
    parts = _random(name, shape, seed).astype("<u8").view("<u2").reshape(*shape, 4)
    total = parts.astype(np.int32).sum(axis=-1, dtype=np.int32)
    centred: NDArray[np.float32] = (total - np.int32(2 * 65535)).astype(np.float32)
    return centred * np.float32(math.sqrt(3) / 65536)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bf16 bits, rounded to nearest even. `values` hold no NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest E4M3 codes; beyond 448 the code of 448, never NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    table = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8), np.maximum(exponent, 1) - 10)
    midpoints = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    magnitude = np.searchsorted(midpoints, np.abs(values)).astype(np.uint8)
    return magnitude | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def _to_e2m1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest E2M1 codes, one to a byte; beyond 6 the code of 6."""
    magnitude = np.searchsorted(_E2M1_MIDPOINTS, np.abs(values)).astype(np.uint8)
    return magnitude | (np.signbit(values).astype(np.uint8) << np.uint8(3))


__all__ = ["random_tensors"]
