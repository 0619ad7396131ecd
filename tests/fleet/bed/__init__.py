"""A fleet on one machine, for tests: `bed(2)` gives two nodes and a desk, and leaves nothing behind.

Needs Linux and root (`missing()` says what else). Every node is a network, mount, process and host name space with its
own root file system, sshd and Docker Engine; the desk is the machine where deskfleet is typed. What is on a node and
what can go wrong with it is `node.Node`, what both kinds of machine can do `machine.Machine`.
"""

from __future__ import annotations

from .image import EngineImage
from .lifetime import leftovers, missing, sweep
from .machine import Machine
from .network import FABRIC, MANAGEMENT
from .node import Node, NodeSetup
from .whole import Bed, bed

__all__ = [
    "FABRIC",
    "MANAGEMENT",
    "Bed",
    "EngineImage",
    "Machine",
    "Node",
    "NodeSetup",
    "bed",
    "leftovers",
    "missing",
    "sweep",
]
