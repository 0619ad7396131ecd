"""SGLang 0.5.23 over nodes: one launch per node, joined at the head's address; only the head answers HTTP.

Owns its flags, what must not be added to them, and what its log says while it starts. It takes a Spark's 121 GiB for a
large card and its defaults with it, so chunk, graphs and running requests are always given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from deskfleet.errors import ConfigError
from deskfleet.fleet.engines.arguments import Flag, Forbidden, Options, read_options
from deskfleet.fleet.engines.contract import ENGRAM_PATH, Situation
from deskfleet.fleet.engines.environment import Variable
from deskfleet.fleet.engines.names_sglang import OPTIONS, VARIABLES
from deskfleet.fleet.engines.stock import (
    ADAPTER_VARIABLE,
    FREES_NOTHING,
    GATEWAY_PARSES,
    NO_EAGER,
    NO_KEYS,
    StockLauncher,
    column_runs,
    model_path,
)
from deskfleet.fleet.engines.vllm import MAX_IMAGES, WAIT_LIMIT_S, compact
from deskfleet.fleet.launch import HEAD_RANK, Milestone, Receipt
from deskfleet.planner.engine_rules import SGLANG_PAGE_TOKENS, smallest_fraction
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.wishes import EngineName

WATCHDOG_S = 1800
"""A first boot on a new topology tunes kernels for up to half an hour (G-79)."""

HEADROOM, USUAL_FRACTION = 0.06, 0.95
"""What the fraction gets beyond the smallest that should grant the pool, up to the usual one of three Sparks.

The pool is pinned and grows by no byte with it; a fraction that is too small cuts the pool down, or ends the boot. What
is held when the pool is sized is an estimate, and page cache moves it by half a GiB (G-03); three nodes were published
to need 0.944 (M-40)."""

LARGEST_FRACTION = 0.99

_ONE_WAY = "every rank is a part of one tensor-parallel engine"
_FORBIDDEN: Mapping[str, Forbidden] = {
    "--disable-cuda-graph": NO_EAGER,
    "--cuda-graph-backend-decode": Forbidden(NO_EAGER.reason, NO_EAGER.hint, ("full", "breakable")),
    "--cuda-graph-config": Forbidden("it overrules what the plan gives", "use the flags of each phase"),
    "--dcp-size": Forbidden("nobody has verified it for this model", "leave it out", ("1",)),
    "--pp-size": Forbidden("this model refuses it", "leave it out", ("1",)),
    "--dp-size": Forbidden(_ONE_WAY, "leave it out; two fleets serve twice as much", ("1",)),
    "--attn-dp-size": Forbidden(_ONE_WAY, "leave it out", ("1",)),
    "--enable-two-batch-overlap": Forbidden("this model refuses it", "leave it out"),
    "--tool-call-parser": GATEWAY_PARSES,
    "--reasoning-parser": GATEWAY_PARSES,
    "--chat-template": GATEWAY_PARSES,
    "--api-key": NO_KEYS,
    "--admin-api-key": NO_KEYS,
    "--config": Forbidden("a file of flags could say anything", "write its flags into [engine] args"),
}
_UNIFIED: Mapping[str, Forbidden] = {
    "--cpu-offload-gb": FREES_NOTHING,
    "--enable-hierarchical-cache": FREES_NOTHING,
}
_FP4_KV = Forbidden("its records have no kernels here", "leave it out; fp8 is planned", ("fp8_e4m3", "auto"))


class SglangLauncher(StockLauncher):
    """Stock SGLang."""

    name: EngineName = "sglang"
    options: ClassVar[Options] = read_options(OPTIONS)
    known_variables: ClassVar[Collection[str]] = frozenset(VARIABLES.split())
    prefix: ClassVar[str] = "SGLANG_"
    releases: ClassVar[tuple[str, ...]] = ("lmsysorg/sglang",)
    forbidden: ClassVar[Mapping[str, Forbidden]] = _FORBIDDEN
    program: ClassVar[tuple[str, ...]] = ("python3", "-m", "sglang.launch_server")

    def forbidden_at(self, at: Situation) -> Mapping[str, Forbidden]:
        """Offloading is senseless where there is one memory."""
        unified = _UNIFIED if at.plan.cluster.kind.is_unified else {}
        return {**self.forbidden, **unified, "--kv-cache-dtype": _FP4_KV}

    def refusals(self, at: Situation) -> list[Refusal]:
        """Segments that expand make NaN here, for whoever reads more than 64 tokens of a prompt (G-10)."""
        refusals = super().refusals(at)
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments:true" in at.spec.engine.env.get(name, "").lower().replace(" ", ""):
                refusals.append(
                    Refusal(
                        "allocator",
                        f"[engine] env has {name} with expandable_segments:True: prompts of more than 64 tokens then "
                        f"give NaN on {self.title}",
                        "leave it out",
                    )
                )
        if self.uses_adapter(at) and len({len(run) for run in column_runs(at)}) > 1:
            refusals.append(
                Refusal(
                    "Engram",
                    f"{at.tp_size} ranks do not divide the tables' columns, and {self.title} would cut through one",
                    "use 1, 2, 3, 4, 6 or 8 ranks",
                )
            )
        if at.plan.layout.num_drafts and at.plan.inventory.draft_block <= 1:
            refusals.append(
                Refusal(
                    "speculation",
                    f"{at.plan.inventory.name} has one plain draft stage, and only DSPARK is launched here",
                    "plan with num_drafts = 0, or serve it with vllm",
                )
            )
        return refusals

    # --- flags ----------------------------------------------------------------------------------------

    def flags(self, at: Situation, rank: int) -> list[Flag]:
        """All flags of a rank. The same on every rank but for its number, and where it listens."""
        return [
            Flag("--model-path", model_path(at, rank), "[nodes.paths] checkpoint"),
            Flag("--served-model-name", at.served_name, "[checkpoint] model"),
            *self._serving(at, rank),
            *self._ranks(at, rank),
            *self._memory(at),
            *self._kernels(at),
            *self._speculation(at),
            *self._images(at),
            Flag(
                "--weight-loader-drop-cache-after-load",
                None,
                "pages of shards that were read are in the way of the model",
            ),
            Flag(
                "--watchdog-timeout",
                str(WATCHDOG_S),
                "kernels may be compiled and tuned while serving",
                is_default=True,
            ),
        ]

    def _serving(self, at: Situation, rank: int) -> list[Flag]:
        # Other ranks answer only whether they live, and only on their own machine.
        is_public = rank == HEAD_RANK and not at.head_is_local
        return [
            Flag("--host", "0.0.0.0" if is_public else "127.0.0.1", "the gateway alone talks to it"),
            Flag("--port", str(at.ports.engine), "by the fleet's name"),
            Flag("--enable-metrics", None, "the gateway tells busy from hanging by them"),
            Flag("--enable-cache-report", None, "the gateway reports cached tokens"),
            Flag(
                "--grammar-backend", "llguidance", "the gateway sends grammars of its kind", is_default=True
            ),
        ]

    def _ranks(self, at: Situation, rank: int) -> list[Flag]:
        layout = at.plan.layout
        flags = [
            Flag("--tp-size", str(layout.tp_size), "plan: tp_size"),
            Flag("--ep-size", str(layout.ep_size), "plan: ep_size"),
        ]
        if at.tp_size == 1:
            return flags
        meeting = f"{at.rendezvous_address}:{at.ports.rendezvous}"
        return [
            *flags,
            Flag("--nnodes", str(at.tp_size), "one rank per node"),
            Flag("--node-rank", str(rank), "the node's place in the file"),
            Flag(
                "--dist-init-addr", meeting, "the head's first [nodes] fabric, and a port by the fleet's name"
            ),
            Flag("--dist-timeout", str(WAIT_LIMIT_S), "ranks load at their own pace", is_default=True),
        ]

    def _memory(self, at: Situation) -> list[Flag]:
        layout = at.plan.layout
        seqs = str(layout.max_num_seqs)
        return [
            Flag("--context-length", str(layout.max_model_len), "plan: max_model_len"),
            Flag("--max-running-requests", seqs, "plan: max_num_seqs"),
            Flag("--chunked-prefill-size", str(layout.chunk_tokens), "plan: chunk_tokens"),
            Flag("--max-total-tokens", str(pool_tokens(at)), "plan: kv_tokens, in whole pages"),
            Flag(
                "--mem-fraction-static",
                f"{fraction(at):.3f}",
                "the plan's fraction, or one that grants this pool",
            ),
            Flag("--page-size", str(SGLANG_PAGE_TOKENS), "the page for which attention has kernels"),
            Flag("--cuda-graph-max-bs-decode", seqs, "plan: every batch that can occur, and no larger"),
        ]

    def _kernels(self, at: Situation) -> list[Flag]:
        flags = [Flag("--kv-cache-dtype", "fp8_e4m3", "plan: kv_format")]
        if at.arch.startswith("sm12"):
            flags.append(
                Flag(
                    "--fp8-gemm-backend",
                    "flashinfer_cutlass",
                    "blocks of 32 x 32 have no other kernel here",
                    is_default=True,
                )
            )
        return flags

    def _speculation(self, at: Situation) -> list[Flag]:
        drafts = at.plan.layout.num_drafts
        if not drafts:
            return []
        return [
            Flag("--speculative-algorithm", "DSPARK", "plan: num_drafts"),
            Flag("--speculative-dspark-block-size", str(drafts), "plan: num_drafts"),
            Flag("--speculative-use-block-verification", None, "exact for sampled answers"),
            Flag(
                "--min-free-slots-delay", "1", "else the last slots are never filled (S2-69)", is_default=True
            ),
        ]

    def _images(self, at: Situation) -> list[Flag]:
        if not at.plan.inventory.max_image_tokens:
            return []
        if not at.plan.layout.has_images:
            return [Flag("--language-model-only", None, "plan: has_images")]
        limit = compact({"image": MAX_IMAGES})
        return [Flag("--limit-mm-data-per-request", limit, "plan: has_images", is_default=True)]

    # --- environment and log --------------------------------------------------------------------------

    def variables(self, at: Situation, rank: int) -> list[Variable]:
        """SGLang's own."""
        variables = [
            Variable("SGLANG_HOST_IP", at.address_of(rank), "this node's first [nodes] fabric"),
            Variable(
                "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "True gives NaN on this engine (G-10)"
            ),
            Variable("SGLANG_RETURN_ORIGINAL_LOGPROB", "1", "clients get unmodified log probabilities"),
            Variable(
                "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE",
                "0",
                "its sums come in any order: answers would not repeat (S2-84)",
                is_default=True,
            ),
        ]
        if at.plan.layout.engram == "host" or self.uses_adapter(at):
            # The adapter takes over the class that holds tables in host memory.
            variables += [
                Variable("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "1", "tables outside of the accelerator"),
                Variable("SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT", "per_rank", "the other one is of one node"),
            ]
        if self.uses_adapter(at):
            variables.append(
                Variable(ADAPTER_VARIABLE, ENGRAM_PATH, "where our adapter finds this node's rows")
            )
        return [*variables, *self.adapter_variables(at)]

    def milestones(self, at: Situation) -> tuple[Milestone, ...]:
        """Lines of 0.5.23's source; shares from a published start of 12 minutes on three nodes (S2-09)."""
        return (
            Milestone(pattern=r"Load weight begin", what="the ranks have met", share=0.02),
            Milestone(
                pattern=r"Loading safetensors checkpoint shards:.* (?P<done>\d+)/(?P<total>\d+)",
                what="reading weights",
                share=0.04,
            ),
            Milestone(pattern=r"Load weight end", what="weights are loaded", share=0.65),
            Milestone(pattern=r"full_token=\d+", what="the KV pool is there", share=0.75),
            Milestone(pattern=r"Capture .*CUDA graph begin", what="capturing graphs", share=0.80),
            Milestone(pattern=r"Capture .*CUDA graph end", what="graphs are captured", share=0.92),
            Milestone(
                pattern=r"The server is fired up and ready to roll",
                what="the server listens",
                share=0.99,
                ranks=(0,),
            ),
        )

    def receipts(self, at: Situation) -> tuple[Receipt, ...]:
        """The pool on every rank: one that the fraction does not cover is cut down without a word (G-03)."""
        return (
            Receipt(
                name="KV pool",
                pattern=r"full_token=(?P<value>\d+)",
                at_least=pool_tokens(at),
                reason="the pool was cut down: memory was taken by something else, or the fraction is too small",
            ),
        )


def pool_tokens(at: Situation) -> int:
    """Tokens of the pool, in whole pages."""
    return at.plan.layout.kv_tokens // SGLANG_PAGE_TOKENS * SGLANG_PAGE_TOKENS


def fraction(at: Situation) -> float:
    """mem-fraction-static: as wished, else what grants the pool on the poorest node, with some more."""
    wished = at.plan.layout.fraction
    if wished is not None:
        return wished
    smallest = max(_smallest(at, rank) for rank in range(at.tp_size))
    return max(smallest, min(USUAL_FRACTION, smallest + HEADROOM))


def _smallest(at: Situation, rank: int) -> float:
    """The smallest fraction that grants the pool on one rank, LARGEST_FRACTION when none does."""
    lines = at.plan.budgets[rank].lines
    held = sum(line.num_bytes for line in lines if _is_held_when_sizing(line.name, line.kind, line.group))
    needed = sum(line.num_bytes for line in lines if line.group == "kv")
    before = at.plan.cluster.node_of(rank).available_bytes
    try:
        return smallest_fraction(before, before - held, needed)
    except ConfigError:
        return LARGEST_FRACTION


def _is_held_when_sizing(name: str, kind: str, group: str) -> bool:
    """Drafts and graphs come after the pool is sized, as the planner's rule has it."""
    is_later = name.startswith("draft ") or name in ("graph pools", "allocator slack")
    return kind == "persistent" and group not in ("kv", "system") and not is_later


LAUNCHER = SglangLauncher()

__all__ = ["LAUNCHER", "SglangLauncher", "fraction", "pool_tokens"]
