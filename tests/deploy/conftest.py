"""A link on localhost with keys and certificates, and nodes that answer in threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.deploy.certificates import SiteKeys, make_keys, read_members
from atoll.deploy.flower.link import Link
from atoll.deploy.flower.node import Node

SITES = ("Lund", "Porto", "Ulm")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, hosts=["127.0.0.1"], sites=SITES)
    return folder


@pytest.fixture
def link(keys: Path) -> Iterator[Link]:
    with open_link(keys) as link:
        yield link


def open_link(keys: Path, **more) -> Link:
    server = keys / "server"
    certificate = more.pop("certificate", (server / "server.crt", server / "server.key"))
    more = {"patience": 1.5, "hold": 0.3} | more
    sites = {name: one.node for name, one in read_members(server / "sites").items()}
    return Link(("127.0.0.1", more.pop("port", 0)), sites, certificate, **more)


def make_node(keys: Path, link: Link, name: str, **more) -> Node:
    authority = more.pop("authority", keys / "ca.crt")
    mine = SiteKeys.read(keys / "sites" / name)
    return Node(f"127.0.0.1:{link.port}", mine.node, authority, **{"retry": 0.1, "beat": 0.3} | more)


@contextmanager
def serving(node: Node, answer: Callable[[bytes], bytes]) -> Iterator[threading.Thread]:
    """A node that answers in a thread until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=node.serve, args=(answer, stop))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(timeout=20)
        assert not thread.is_alive()
