"""EXL3 checkpoints in the vLLM image that carries the ExLlamaV3 kernels: as vLLM, but for formats, kernels and tables.

The image is built on an earlier vLLM with patches of its own, so that options and variables which the release does not
know are let through with a warning. It reads Engram rows from disk itself: from the two published shards that hold
them, with their index and config.json, in the node's `engram` directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from deskfleet.fleet.engines.arguments import Flag
from deskfleet.fleet.engines.contract import ENGRAM_PATH, Capability, Situation
from deskfleet.fleet.engines.environment import Variable
from deskfleet.fleet.engines.vllm import VllmLauncher, compact
from deskfleet.fleet.launch import Receipt
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.wishes import EngineName

READER_THREADS = 96

TABLE_FILES = ("config.json", "model.safetensors.index.json")
"""What the image reads beside the shards of the tables."""

K_MAP = "/opt/dsv41/exl3_k_map.json"
"""A file of the image."""


class Exl3Launcher(VllmLauncher):
    """The image of the two-node recipe."""

    name: EngineName = "exl3"
    releases: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[frozenset[Capability]] = frozenset({"engram-disk", "head-padding"})

    def refusals(self, at: Situation) -> list[Refusal]:
        """The directory of the tables is read as a checkpoint's: it needs more than the shards (G-21)."""
        refusals = super().refusals(at)
        lacking = [node.name for node in at.nodes if at.rows_lack(node.name, *TABLE_FILES)]
        if at.plan.layout.engram == "disk" and lacking:
            refusals.append(
                Refusal(
                    "Engram",
                    f"{', '.join(lacking)}: the directory of the tables has not both {' and '.join(TABLE_FILES)}",
                    "put them there with the two shards that hold the tables, from the published checkpoint",
                )
            )
        return refusals

    def has_b12x(self, at: Situation) -> bool:
        """Experts have the format's own kernels."""
        return False

    def notes(self, at: Situation) -> Iterator[str]:
        """What cannot be known of an image that is not a release."""
        yield from super().notes(at)
        yield (
            "flags are those of the published recipe of this image; its vLLM is older than the release they are "
            "checked against"
        )
        if at.plan.layout.has_images and "--enable-scale-out" not in at.spec.engine.args:
            yield "images are refused without --enable-scale-out: add it to [engine] args if the image's vLLM has it"

    def ways_in(self) -> list[Flag]:
        """Token ids through /v1/completions, which every vLLM of this model has."""
        return [Flag("--tokenizer-mode", "deepseek_v41", "as published; the model's own")]

    def patience(self) -> list[Flag]:
        """As its vLLM has it: the flags may be younger than the image."""
        return []

    def block_size(self, at: Situation) -> int:
        """Its indexer has kernels for pages of 32 and 64 states."""
        return 64

    def kernels(self, at: Situation) -> list[Flag]:
        """No KV format: the image chooses the one it has kernels for (S3-23)."""
        flags = [
            Flag("--quantization", "exl3", "the checkpoint's format"),
            Flag(
                "--no-enable-flashinfer-autotune",
                None,
                "nothing of it is tuned for these kernels",
                is_default=True,
            ),
        ]
        if at.plan.layout.has_images:
            whole = "widths that kernels cut unevenly are kept whole for images"
            flags.append(Flag("--mm-encoder-tp-mode", "data", whole, is_default=True))
        return flags

    def speculation(self, num_drafts: int, draft_block: int) -> Mapping[str, Any]:
        """The checkpoint's own drafts; the image knows no other way to verify them."""
        return {"method": "dspark", "num_speculative_tokens": num_drafts}

    def tables(self, at: Situation) -> list[Flag]:
        """The image's own key of the model's configuration."""
        if at.plan.layout.engram != "disk":
            return []
        told = compact({"engram_table_dir": ENGRAM_PATH})
        return [Flag("--hf-overrides", told, "where the image finds the shards of the tables")]

    def variables(self, at: Situation, rank: int) -> list[Variable]:
        """The image's own, as its recipe sets them."""
        alone = "all its kernels share one buffer of locks: two at a time never end (G-96)"
        memory = "host memory is the accelerator's"
        return [
            *super().variables(at, rank),
            Variable("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1", alone),
            Variable("DSV41_EXL3_SERIAL_STREAMS", "1", alone),
            Variable("DSV41_EXL3_K_MAP", K_MAP, "how many bits each tensor has: they differ (G-25)"),
            Variable("DSV41_SOURCE", ENGRAM_PATH, "where the image finds the shards of the tables"),
            Variable("FLASHINFER_DISABLE_VERSION_CHECK", "1", "its FlashInfer is patched"),
            Variable(
                "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
                "256",
                "scores of a chunk at long prefixes, as published",
                is_default=True,
            ),
            Variable(
                "DSV41_PREFILL_EMPTY_CACHE_TOKENS",
                "8192",
                "freed blocks of shorter prefixes serve no longer ones (G-09)",
                is_default=True,
            ),
            Variable("DSV41_CACHE_GIB", "0", memory, is_default=True),
            Variable("DSV41_RESIDENT_SCALES", "0", memory, is_default=True),
            Variable("DSV41_IO_THREADS", str(READER_THREADS), "reads at once, as published", is_default=True),
        ]

    def kernel_receipts(self, at: Situation) -> Sequence[Receipt]:
        """Its log has no line of its own for them."""
        return ()


LAUNCHER = Exl3Launcher()

__all__ = ["LAUNCHER", "Exl3Launcher"]
