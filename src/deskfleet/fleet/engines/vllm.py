"""vLLM 0.33 over nodes: one process per node, `--headless` on all but the head, joined by torch's own rendezvous.

Owns its flags, what must not be added to them, and what its log says while it starts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from deskfleet.fleet.engines.arguments import Flag, Forbidden, Options, read_options
from deskfleet.fleet.engines.contract import CACHE_PATH, ENGRAM_PATH, Situation
from deskfleet.fleet.engines.environment import Variable
from deskfleet.fleet.engines.names_vllm import OPTIONS, VARIABLES
from deskfleet.fleet.engines.stock import (
    ADAPTER_KEY,
    FREES_NOTHING,
    GATEWAY_PARSES,
    NO_EAGER,
    NO_KEYS,
    StockLauncher,
    asked_store,
    model_path,
)
from deskfleet.fleet.launch import HEAD_RANK, Milestone, Receipt
from deskfleet.planner.engine_rules import largest_utilisation
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.graphs import capture_sizes
from deskfleet.planner.wishes import EngineName

MAX_IMAGES = 4
"""Images of one request, as published recipes allow."""

STEP_TIMEOUT_S = 1800
"""A kernel that is compiled while serving may take minutes; the engine's own 300 s would end it (R-19)."""

START_LIMIT_S = 7200
"""When an engine gives a start up by itself. A published one takes 11 minutes, vLLM's own limit is 10; whether a start
still moves on is seen by its milestones."""

WAIT_LIMIT_S = 3600
"""How long a rank waits for the others in one exchange: a worker may read its weights a quarter of an hour longer than
the head (S3-30), and compile for half an hour after a change of topology (G-79)."""

_ONE_WAY = "every rank is a part of one tensor-parallel engine"
_FORBIDDEN: Mapping[str, Forbidden] = {
    "--enforce-eager": NO_EAGER,
    "--decode-context-parallel-size": Forbidden(
        "nothing of it is implemented for this model, and the engine does not say so", "leave it out", ("1",)
    ),
    "--prefill-context-parallel-size": Forbidden(
        "it excludes speculation, and is not planned for", "leave it out", ("1",)
    ),
    "--pipeline-parallel-size": Forbidden(_ONE_WAY, "leave it out", ("1",)),
    "--data-parallel-size": Forbidden(_ONE_WAY, "leave it out; two fleets serve twice as much", ("1",)),
    "--enable-dbo": Forbidden("it is refused with Engram", "leave it out"),
    "--tool-call-parser": GATEWAY_PARSES,
    "--tool-parser-plugin": GATEWAY_PARSES,
    "--reasoning-parser": GATEWAY_PARSES,
    "--reasoning-parser-plugin": GATEWAY_PARSES,
    "--enable-auto-tool-choice": GATEWAY_PARSES,
    "--chat-template": GATEWAY_PARSES,
    "--default-chat-template-kwargs": GATEWAY_PARSES,
    "--reasoning-effort-map": GATEWAY_PARSES,
    "--override-generation-config": Forbidden(
        "limits of answers are the gateway's policies", "set them in the file of policies"
    ),
    "--api-key": NO_KEYS,
    "--config": Forbidden("a file of flags could say anything", "write its flags into [engine] args"),
}
_UNIFIED: Mapping[str, Forbidden] = {
    "--cpu-offload-gb": FREES_NOTHING,
    "--kv-offloading-size": FREES_NOTHING,
    "--kv-transfer-config": FREES_NOTHING,
}
_FP4_KV = Forbidden(
    "its records have kernels on compute capability 10.0 only", "leave it out; fp8 is planned"
)


def compact(value: Any) -> str:
    """JSON as a flag's value, without blanks."""
    return json.dumps(value, separators=(",", ":"))


class VllmLauncher(StockLauncher):
    """Stock vLLM."""

    name: EngineName = "vllm"
    options: ClassVar[Options] = read_options(OPTIONS)
    known_variables: ClassVar[Collection[str]] = frozenset(VARIABLES.split())
    prefix: ClassVar[str] = "VLLM_"
    releases: ClassVar[tuple[str, ...]] = ("vllm/vllm-openai",)
    forbidden: ClassVar[Mapping[str, Forbidden]] = _FORBIDDEN
    program: ClassVar[tuple[str, ...]] = ("vllm", "serve")

    def forbidden_at(self, at: Situation) -> Mapping[str, Forbidden]:
        """Offloading is senseless where there is one memory, FP4 KV where there are no kernels."""
        extra = dict(_UNIFIED) if at.plan.cluster.kind.is_unified else {}
        if at.arch != "sm100":
            extra["--kv-cache-dtype"] = Forbidden(
                _FP4_KV.reason, _FP4_KV.hint, ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
            )
        return {**self.forbidden, **extra}

    def refusals(self, at: Situation) -> list[Refusal]:
        """Experts are whole on all ranks or on none."""
        refusals = super().refusals(at)
        layout = at.plan.layout
        if layout.kv_format != "fp8":
            refusals.append(
                Refusal(
                    "KV format",
                    f"{layout.kv_format} KV: {self.title} is launched with fp8, and {layout.kv_format} has kernels in "
                    "other images only",
                    "leave kv_format out; fp8 takes no more memory than nvfp4",
                )
            )
        if layout.ep_size not in (1, layout.tp_size):
            refusals.append(
                Refusal(
                    "expert split",
                    f"ep_size {layout.ep_size} on {layout.tp_size} ranks: {self.title} shares experts out "
                    "over all ranks or cuts each",
                    f"take 1 or {layout.tp_size}",
                )
            )
        return refusals

    def notes(self, at: Situation) -> Iterator[str]:
        """Kernels that are not in every image."""
        yield from super().notes(at)
        if self.has_b12x(at):
            yield "the image must have b12x (vllm[b12x]): experts and dense layers are planned with its kernels"

    def has_b12x(self, at: Situation) -> bool:
        """Whether b12x's kernels are asked for."""
        return at.arch.startswith("sm12")

    # --- flags ----------------------------------------------------------------------------------------

    def flags(self, at: Situation, rank: int) -> list[Flag]:
        """All flags of a rank. The same on every rank but for its number, and who listens."""
        return [
            Flag(model_path(at, rank), None, "[nodes.paths] checkpoint"),
            Flag("--served-model-name", at.served_name, "[checkpoint] model"),
            *self._serving(at, rank),
            *self._ranks(at, rank),
            *self._memory(at),
            *self.kernels(at),
            *self._speculation(at),
            *self._graphs(at),
            *self._images(at),
            *self.tables(at),
            Flag(
                "--safetensors-load-strategy",
                "lazy",
                "reading ahead over NFS would fill memory that the model needs",
            ),
        ]

    def _serving(self, at: Situation, rank: int) -> list[Flag]:
        flags = [
            *self.ways_in(),
            Flag("--enable-prompt-tokens-details", None, "the gateway reports cached tokens"),
            Flag("--generation-config", "vllm", "defaults of sampling are the gateway's"),
        ]
        if rank != HEAD_RANK:
            return flags
        host = "127.0.0.1" if at.head_is_local else "0.0.0.0"
        return [
            Flag("--host", host, "the gateway alone talks to it"),
            Flag("--port", str(at.ports.engine), "by the fleet's name"),
            *flags,
        ]

    def ways_in(self) -> list[Flag]:
        """How the gateway is to ask."""
        return [Flag("--enable-scale-out", None, "token ids in and out for the gateway, images too")]

    def _ranks(self, at: Situation, rank: int) -> list[Flag]:
        layout = at.plan.layout
        flags = [Flag("--tensor-parallel-size", str(layout.tp_size), "plan: tp_size")]
        if layout.ep_size > 1:
            flags.append(Flag("--enable-expert-parallel", None, "plan: ep_size"))
        flags.append(Flag("--distributed-executor-backend", "mp", "one process per node, without Ray"))
        if at.tp_size == 1:
            return flags
        flags += [
            Flag("--nnodes", str(at.tp_size), "one rank per node"),
            Flag("--node-rank", str(rank), "the node's place in the file"),
            Flag("--master-addr", at.rendezvous_address, "the head's first [nodes] fabric"),
            Flag("--master-port", str(at.ports.rendezvous), "by the fleet's name"),
            *self.patience(),
        ]
        if rank != HEAD_RANK:
            flags.append(Flag("--headless", None, "only the head answers HTTP"))
        return flags

    def patience(self) -> list[Flag]:
        """How long ranks wait for each other."""
        names = ("--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds")
        return [
            Flag(name, str(WAIT_LIMIT_S), "ranks load at their own pace", is_default=True) for name in names
        ]

    def _memory(self, at: Situation) -> list[Flag]:
        layout = at.plan.layout
        return [
            Flag("--max-model-len", str(layout.max_model_len), "plan: max_model_len"),
            Flag("--max-num-seqs", str(layout.max_num_seqs), "plan: max_num_seqs"),
            Flag("--max-num-batched-tokens", str(layout.chunk_tokens), "plan: chunk_tokens"),
            Flag("--kv-cache-memory-bytes", str(pool_bytes(at)), "plan: the KV and window pools"),
            Flag(
                "--gpu-memory-utilization",
                f"{utilisation(at):.2f}",
                "plan: the most that may be claimed at start; the pool is given in bytes",
            ),
            Flag("--block-size", str(self.block_size(at)), "the page for which attention has kernels"),
        ]

    def block_size(self, at: Situation) -> int:
        """Tokens of a page: 128 for V4.1, else the smallest listed size is taken and refused (S1-46); 256 for V4."""
        return 128 if at.plan.inventory.architecture == "v4.1" else 256

    def kernels(self, at: Situation) -> list[Flag]:
        """Formats and kernels."""
        flags = [Flag("--kv-cache-dtype", "fp8", "plan: kv_format")]
        if self.has_b12x(at):
            flags += [
                Flag("--moe-backend", "b12x", "the fastest for MXFP4 experts here", is_default=True),
                Flag("--linear-backend", "b12x", "the same for dense layers", is_default=True),
                Flag(
                    "--sparse-indexer-topk-backend",
                    "per_row",
                    "the usual one asks for more processors than this accelerator has",
                    is_default=True,
                ),
            ]
        return flags

    def _speculation(self, at: Situation) -> list[Flag]:
        drafts = at.plan.layout.num_drafts
        if not drafts:
            return []
        config = self.speculation(drafts, at.plan.inventory.draft_block)
        return [Flag("--speculative-config", compact(config), "plan: num_drafts")]

    def speculation(self, num_drafts: int, draft_block: int) -> Mapping[str, Any]:
        """DSpark, verified by blocks: exact for sampled answers. V4's single plain stage is vLLM's `mtp`."""
        if draft_block <= 1:
            return {"method": "mtp", "num_speculative_tokens": num_drafts}
        return {
            "method": "dspark",
            "num_speculative_tokens": num_drafts,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "block",
            "enable_adaptive_verification": False,
        }

    def _graphs(self, at: Situation) -> list[Flag]:
        layout = at.plan.layout
        sizes = capture_sizes(layout.max_num_seqs, layout.num_drafts)
        config = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": list(sizes)}
        return [
            Flag("--compilation-config", compact(config), "plan: every batch that can occur, and no other")
        ]

    def _images(self, at: Situation) -> list[Flag]:
        if not at.plan.inventory.max_image_tokens:
            return []
        count = MAX_IMAGES if at.plan.layout.has_images else 0
        flags = [
            Flag("--limit-mm-per-prompt", compact({"image": count}), "plan: has_images", is_default=count > 0)
        ]
        if count:
            flags.append(Flag("--mm-processor-cache-gb", "1", "host memory is counted once", is_default=True))
        return flags

    def tables(self, at: Situation) -> list[Flag]:
        """Where Engram rows lie."""
        placement = at.plan.layout.engram
        if placement == "none":
            return []
        config = {"cpu_offload": placement != "device"}
        flags = [Flag("--engram-config", compact(config), f"plan: Engram on {placement}")]
        if self.uses_adapter(at):
            store = asked_store(at)
            told = {"pack": ENGRAM_PATH} | ({} if store is None else {"store": store})
            reason = "where our adapter finds this node's rows"
            flags.append(Flag("--additional-config", compact({ADAPTER_KEY: told}), reason))
        return flags

    # --- environment and log --------------------------------------------------------------------------

    def variables(self, at: Situation, rank: int) -> list[Variable]:
        """vLLM's own."""
        return [
            Variable("VLLM_HOST_IP", at.address_of(rank), "this node's first [nodes] fabric"),
            Variable("VLLM_CACHE_ROOT", f"{CACHE_PATH}/vllm", "this node's own disk"),
            Variable("VLLM_NO_USAGE_STATS", "1", "no reports to anybody"),
            *self.adapter_variables(at),
            Variable(
                "VLLM_ENGINE_READY_TIMEOUT_S",
                str(START_LIMIT_S),
                "its own limit is shorter than a usual start",
                is_default=True,
            ),
            Variable(
                "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
                str(STEP_TIMEOUT_S),
                "kernels may be compiled while serving",
                is_default=True,
            ),
            Variable(
                "PYTORCH_CUDA_ALLOC_CONF",
                "expandable_segments:True",
                "transients that grow with a prompt find no room otherwise",
                is_default=True,
            ),
        ]

    def milestones(self, at: Situation) -> tuple[Milestone, ...]:
        """Lines of 0.33's source; shares from a published start of 11 minutes on four nodes (S1-24)."""
        return (
            Milestone(
                pattern=r"rank \d+ in world size \d+ is assigned",
                what="the ranks have met",
                share=0.02,
            ),
            Milestone(
                pattern=r"Loading safetensors checkpoint shards:.* (?P<done>\d+)/(?P<total>\d+)",
                what="reading weights",
                share=0.05,
            ),
            Milestone(pattern=r"Model loading took", what="weights are loaded", share=0.65),
            Milestone(
                pattern=r"KV cache size: [\d,]+ tokens", what="the KV pool is there", share=0.68, ranks=(0,)
            ),
            Milestone(
                pattern=r"Capturing CUDA graphs.* (?P<done>\d+)/(?P<total>\d+)",
                what="capturing graphs",
                share=0.70,
            ),
            Milestone(pattern=r"Graph capturing finished", what="graphs are captured", share=0.95),
            Milestone(pattern=r"Starting vLLM server on", what="the server listens", share=0.99, ranks=(0,)),
        )

    def receipts(self, at: Situation) -> tuple[Receipt, ...]:
        """A pool for at least one request of full length, and the kernels that were asked for."""
        return (
            Receipt(
                name="KV pool",
                pattern=r"KV cache size: (?P<value>[\d,]+) tokens",
                at_least=at.plan.layout.max_model_len,
                ranks=(HEAD_RANK,),
                reason="the pool is smaller than one request of full length",
            ),
            *self.kernel_receipts(at),
        )

    def kernel_receipts(self, at: Situation) -> Sequence[Receipt]:
        """The experts' kernels; another choice costs half the speed without a word (S1-25)."""
        if not self.has_b12x(at) or "--moe-backend" in at.spec.engine.args:
            return ()
        return (
            Receipt(
                name="experts' kernels",
                pattern=r"Using '?\w*B12X\w*'? .*MoE backend",
                reason="the experts run on other kernels than planned",
            ),
        )


def pool_bytes(at: Situation) -> int:
    """Bytes of the pool, as the planner's rule of the engine has it: KV and windows, the same on every rank."""
    return sum(line.num_bytes for line in at.plan.budgets[HEAD_RANK].lines if line.group == "kv")


def utilisation(at: Situation) -> float:
    """gpu-memory-utilization: as wished, else the most that the node with least free memory admits.

    The same on all ranks. Raises ConfigError when a node has hardly any memory free.
    """
    wished = at.plan.layout.fraction
    if wished is not None:
        return wished
    nodes = [at.plan.cluster.node_of(rank) for rank in range(at.tp_size)]
    return min(largest_utilisation(node.total_bytes, node.available_bytes) for node in nodes)


LAUNCHER = VllmLauncher()

__all__ = ["LAUNCHER", "MAX_IMAGES", "WAIT_LIMIT_S", "VllmLauncher", "compact", "pool_bytes", "utilisation"]
