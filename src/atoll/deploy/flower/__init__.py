"""Sites on a network, over Flower's fleet interface. Nothing else in Atoll imports Flower.

The server offers the paths by which nodes fetch messages and bring replies, and no others: nobody can register a key
or start a run over the network, because nothing listens for it. A node is one process that stays; a message is an
envelope of bytes that Flower carries and does not read.

This module is a `atoll.deploy.network.Network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from atoll.deploy.flower.link import Link
    from atoll.deploy.flower.node import Node


def listen(address: tuple[str, int], sites: Mapping[str, bytes], certificate: tuple[Path, Path] | None) -> Link:
    """Return the server's side; see `Network`."""
    from atoll.deploy.flower.link import Link

    return Link(address, sites, certificate)


def connect(server: str, key: ec.EllipticCurvePrivateKey, authority: Path | None) -> Node:
    """Return a site's side; see `Network`."""
    from atoll.deploy.flower.node import Node

    return Node(server, key, authority)
