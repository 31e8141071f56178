"""Give sites and a coordinator damaged and crafted messages: none that was changed may be accepted, nothing may break.

    python benchmarks/fuzz_messages.py                     10,000 messages, half of them to a site
    python benchmarks/fuzz_messages.py --count 100000 --seed 1

Half of the messages are damaged: their bytes are changed after they were signed. The others are crafted: changed and
signed anew with the right key, as a site or coordinator that has gone bad could do it. These are refused, or have the
right form still. The script ends with 1 if a damaged message is accepted or if anything but a refusal is raised.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from atoll import LocalEngine, federate
from atoll.compose import create
from atoll.deploy import messages
from atoll.deploy.engine import Federation, SitesEngine
from atoll.deploy.keys import Key
from atoll.deploy.site import Site
from atoll.deploy.tasks import task_elsewhere
from atoll.deploy.terms import Place, write_terms
from atoll.testing.conformance.tasks import build_task
from atoll.testing.fuzzing import Outcome, Probing, fuzz

METHODS = ("fedavg", "scaffold", "fedamp", "ifca:clusters=2", "fafi:epochs=1")


def play(method: str, folder: Path, count: int, seed: int) -> list[Outcome]:
    """Run a method with one client at each site; return what became of messages to the coordinator and to a site."""
    task, asked = build_task(), create(method)
    engine = LocalEngine(device="cpu", strategy="loop eager")
    places = {f"site-{client}": Place(clients=[client]) for client in range(task.clients)}
    terms = write_terms(task.public_facts(0), places, rounds=1)
    keys = {name: Key.make(name) for name in places}

    def make_site(name: str, folder: Path) -> Site:
        own = task.of(np.array(places[name].clients))
        return Site(keys[name], lambda *_: own, folder / name, engine=engine, needs_validation=False)

    there = task_elsewhere(
        task.name, task.network, task.x[0], task.y[0], clients=task.clients, classes=task.classes,
        training=task.training,
    )  # fmt: skip
    federation = Federation.begin(terms, Key.make("coordinator"))
    jobs: list[bytes] = []

    class Listening(Probing):
        def exchange(self, asked, exchange):
            jobs.append(next(iter(asked.values())))
            yield from super().exchange(asked, exchange)

    transport = Listening({name: make_site(name, folder) for name in places}, keys, count // 4, seed)
    federate(there, asked, engine=SitesEngine(federation, transport, engine=engine), rounds=1)
    newcomer = make_site("site-0", folder / "anew")
    at_site = fuzz(jobs, federation.key, lambda data: newcomer.receive(messages.read(data)), count // 2, seed)
    return [*transport.found, at_site]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    reasons: Counter[str] = Counter()
    tried = accepted = fitting = grown = 0
    errors: list[str] = []
    for number, method in enumerate(METHODS):
        with tempfile.TemporaryDirectory() as folder:
            for found in play(method, Path(folder), asked.count // len(METHODS), asked.seed + number):
                tried, accepted, fitting = tried + found.tried, accepted + found.accepted, fitting + found.fitting
                grown += found.grown
                errors += found.errors
                reasons += found.refused
    print(f"{tried:,} messages: {sum(reasons.values()):,} refused, {fitting:,} crafted ones of the right form")
    print(f"damaged messages accepted: {accepted}; errors that are no refusal: {len(errors)}")
    print(f"the process grew by {grown / 2**20:.0f} MiB")
    for reason, count in reasons.most_common(12):
        print(f"{count:>7,}  {reason}")
    for error in errors[:10]:
        print(f"error: {error}")
    sys.exit(bool(accepted or errors))


if __name__ == "__main__":
    main()
