"""Compiles the CUDA C++ kernels for sm_90a without a GPU and reports what NVRTC made of them.

    python tools/native_sass.py [--nvrtc FILE] [--rows 1,4,16,32,64] [--exact] [--code] [NAME ...]

In the environment of tools/triton_env.sh, whose disassembler it uses; NVRTC is that of torch, of nvidia-cuda-nvrtc
beside it, or FILE. The variants are those that steps of these sizes of a rank of four launch, recorded by running them
on tensors without memory. For each: threads, registers, the bytes and instructions of spills, shared memory of a
block, blocks that a processor holds, instructions in all, of the integer pipe, in the longest loop, and the most
frequent ones. --exact has products with float32 sums; --code prints the listings, too.
Exits 1 when a kernel spills or does not compile.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction
from triton_sass import INTEGER, longest_loop, opcode, tool

from deskfleet.engine.cuda import linear, native, synthetic
from deskfleet.engine.cuda.native import compiler, products, source
from deskfleet.engine.cuda.native.arguments import extent
from deskfleet.engine.cuda.step import DecodeStep, make_pages
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict

PROCESSORS = 132  # of an H200
# Of a processor of sm_90.
REGISTERS, SHARED_BYTES, THREADS, RESERVED_BYTES = 65536, 228 << 10, 2048, 1 << 10


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants, and how a step launches it."""

    file: str
    entry: str
    constants: source.Constants
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return " ".join((self.file, self.entry, *(f"{name}={value}" for name, value in self.constants)))


class Recorder:
    """Stands where a kernel would, and keeps what is asked of it."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}

    def __call__(self, file, entry, defines=None):
        self._wanted = (str(file), entry, source.constants(defines or {}))
        return self

    def launch(self, grid, block, shared_bytes, args, *, dependent=False) -> None:
        x, y, z = extent(block)
        found = Variant(*self._wanted, extent(grid), x * y * z, shared_bytes)
        self.variants.setdefault(found.name, found)


def variants(rows: list[int], *, exact: bool) -> list[Variant]:
    """What steps of so many rows launch, each once; `exact` as of packing.Fp4Tiles."""
    recorder = Recorder()
    native.kernel = native.emulated = recorder
    products.num_processors = lambda device: PROCESSORS
    config, device = ModelConfig.from_dict(published_config_dict()), torch.device("meta")
    synthetic.random_bytes = lambda shape, seed, device: torch.empty(shape, dtype=torch.uint8, device=device)
    JITFunction.__getitem__ = lambda kernel, grid: lambda *arguments, **options: None
    shape = synthetic.RankShape(config, 4, exact=exact)
    layers = [synthetic.make_layer(shape, plan, 0, device) for plan in config.layers]
    embedding = torch.empty(shape.vocabulary, config.hidden_size, dtype=torch.bfloat16, device=device)
    head = linear.pack_bf16(embedding)
    for num_rows in rows:
        pages = make_pages(config, num_slots=num_rows, max_model_len=1164, block_size=64, device=device)
        norm = embedding[0].float()
        DecodeStep(
            shape, layers, embedding, head, norm, pages, num_rows=num_rows, device=device, bit_ops=False
        ).run()
    return list(recorder.variants.values())


def report(variant: Variant, nvrtc: compiler.Compiler, code: bool) -> bool:
    """Print one variant; False when it spills or does not compile."""
    try:
        cubin = nvrtc.cubin(variant.file, variant.entry, variant.constants, (9, 0))
    except EngineError as error:
        print(f"!! {variant.name}\n      {error.message}", flush=True)
        return False
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name).partition(f"Function {variant.entry}:")[2]
        listing = tool("nvdisasm", "-c", file.name)
    registers, stack, shared = (
        int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "SHARED")
    )
    everything = [one for one in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", listing) if opcode(one) != "NOP"]
    counts = Counter(map(opcode, everything))
    spills = counts["LDL"] + counts["STL"]
    static = max(shared - RESERVED_BYTES, 0)
    block_bytes = static + variant.shared_bytes + RESERVED_BYTES
    per_warp = -(-registers // 8) * 8 * 32
    held = min(
        REGISTERS // per_warp * 32 // variant.threads, SHARED_BYTES // block_bytes, THREADS // variant.threads
    )
    integer = sum(number for name, number in counts.items() if name in INTEGER)
    top = ", ".join(f"{name} {number}" for name, number in counts.most_common(10))
    print(
        f"{'!!' if spills or stack else '  '} {variant.name}\n"
        f"      grid {'x'.join(map(str, variant.grid))} threads {variant.threads} regs {registers} stack {stack} "
        f"spills {spills} shared {static} + {variant.shared_bytes} blocks/processor {held}\n"
        f"      instructions {len(everything)} integer {integer} loop {len(longest_loop(listing))}  [{top}]",
        flush=True,
    )
    if code:
        print(listing)
    return not spills and not stack


def main() -> int:
    """Report the variants whose names contain every argument."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--nvrtc", type=Path, help="libnvrtc.so of another place")
    parser.add_argument("--rows", default="1,4,16,32,64", help="sizes of steps")
    parser.add_argument("--exact", action="store_true", help="products with float32 sums")
    parser.add_argument("--code", action="store_true", help="print the listings")
    options = parser.parse_args()
    nvrtc = compiler.Compiler(options.nvrtc)
    found = variants([int(number) for number in options.rows.split(",")], exact=options.exact)
    chosen = [variant for variant in found if all(name in variant.name for name in options.names)]
    if not chosen:
        raise SystemExit(f"none of {len(found)} variants has {' '.join(options.names)} in its name")
    print(f"NVRTC {nvrtc.version}, {len(chosen)} of {len(found)} variants")
    reports = [report(one, nvrtc, options.code) for one in chosen]  # every one, also after a bad one
    return 0 if all(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
