"""Our own engine over nodes: each rank dials the supervisor, which hosts the engine's front and the gateway.

What a rank is to do comes over that connection; its command line says only what differs from node to node.
"""

from __future__ import annotations

from deskfleet import env
from deskfleet.fleet.engines.contract import ENGRAM_PATH, Process, Situation
from deskfleet.fleet.engines.stock import checkpoint_place, model_path
from deskfleet.fleet.launch import Milestone, Mount, Receipt
from deskfleet.model.embedded import POCKET
from deskfleet.planner.engines.contract import Refusal
from deskfleet.planner.wishes import EngineName

TOKEN_SECRET = "rank-token"
"""Made by the supervisor for each launch; the only secret that no fleet.toml refers to."""


class NativeLauncher:
    """The engine of this package."""

    name: EngineName = "native"

    def refusals(self, at: Situation) -> list[Refusal]:
        """It takes flags from nobody: what is wished is in the plan."""
        refusals = []
        if at.spec.engine.args:
            refusals.append(
                Refusal(
                    "arguments",
                    f"[engine] args have {' '.join(at.spec.engine.args)}, and ranks of our own engine take none",
                    "use [wishes]",
                )
            )
        if at.connect is None:
            refusals.append(
                Refusal("supervisor", "nobody said where ranks find the supervisor", "give connect HOST:PORT")
            )
        return refusals

    def process(self, at: Situation, rank: int) -> Process:
        """`deskfleet rank`, with this node's paths."""
        interface = at.fabric_of(rank).socket_interface
        has_checkpoint = at.spec.checkpoint.model != POCKET
        # Without a pack it reads the published shards in place.
        has_pack = at.plan.layout.engram == "disk" and at.has_pack(at.node(rank).name)
        argv = [
            *("deskfleet", "rank", model_path(at, rank) if has_checkpoint else POCKET),
            *("--connect", at.connect or ""),
            *("--rank", str(rank)),
            *("--launch", at.launch_id),
            *(("--engram-pack", ENGRAM_PATH) if has_pack else ()),
            *(("--interface", interface) if interface is not None and at.tp_size > 1 else ()),
        ]
        paths = at.node(rank).paths
        mounts = []
        if has_checkpoint:
            mounts.append(checkpoint_place(paths.checkpoint)[0])
        if has_pack:
            mounts.append(Mount(source=paths.engram, target=ENGRAM_PATH))
        variables = {env.RANK_TOKEN.name: f"${{secret:{TOKEN_SECRET}}}"}
        clash = sorted(set(variables) & set(at.spec.engine.env))
        refusals = [
            Refusal("environment", f"[engine] env has {name}, which each launch sets", "leave it out")
            for name in clash
        ]
        return Process(
            argv=tuple(argv),
            env=dict(sorted({**at.spec.engine.env, **variables}.items())),
            mounts=tuple(mounts),
            refusals=tuple(refusals),
        )

    def endpoint(self, at: Situation) -> str:
        """It has no HTTP."""
        return ""

    def milestones(self, at: Situation) -> tuple[Milestone, ...]:
        """Ranks report over their connection, not by their log."""
        return ()

    def receipts(self, at: Situation) -> tuple[Receipt, ...]:
        """The same: the engine's front checks them."""
        return ()

    def adapter(self, at: Situation) -> None:
        """It reads rows itself."""
        return None


LAUNCHER = NativeLauncher()

__all__ = ["LAUNCHER", "TOKEN_SECRET", "NativeLauncher"]
