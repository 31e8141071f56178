"""A site in a process of its own, in float64, for tests: `python site_process.py NAME SERVER KEYS STATE`."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from deploy.tools import engine

from atoll.deploy.certificates import SiteKeys
from atoll.deploy.client import Attendant
from atoll.deploy.coordinator import seat_sites
from atoll.deploy.flower.node import Node
from atoll.deploy.site import Site
from atoll.runtime.engines.measuring import one_thread_each
from atoll.testing.conformance.tasks import build_task

CLIENTS = {"Lund": 2, "Porto": 1, "Ulm": 3}


def watch(file: Path) -> None:
    """Write down every address that this process looks up or connects to."""

    def hear(event: str, given: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            with file.open("a") as lines:
                lines.write(f"{given[1] if event == 'socket.connect' else given[0]}\n")

    sys.addaudithook(hear)


def main(name: str, server: str, keys: str, state: str) -> None:
    watch(Path(f"{state}.addresses"))
    mine = SiteKeys.read(Path(keys) / "sites" / name)
    own = build_task().of(np.array(seat_sites(CLIENTS, CLIENTS)[name].clients))
    assert mine.coordinator is not None
    site = Site(
        mine.key, lambda terms: own, Path(state), site=name, coordinator=mine.coordinator.value.hex(), engine=engine(),
        needs_validation=False,
    )  # fmt: skip
    attendant = Attendant(mine.key, site, lambda question: own.clients, lambda message, reply: None, stay=True)
    with one_thread_each():
        attendant.attend(Node(server, mine.node, mine.authority, retry=0.2, beat=0.5))


if __name__ == "__main__":
    main(*sys.argv[1:])
