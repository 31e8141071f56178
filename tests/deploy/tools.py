"""A federation in one process: the sites of a small task, each with its own key, folder and samples."""

import numpy as np
import torch

from atoll import LocalEngine, federate
from atoll.deploy.engine import Federation, InProcess, SitesEngine
from atoll.deploy.journal import Journal
from atoll.deploy.keys import Key
from atoll.deploy.site import Site
from atoll.deploy.tasks import task_elsewhere
from atoll.deploy.terms import Place, write_terms
from atoll.testing.conformance.tasks import build_task

GROUPS = ((0,), (1, 2), (3,), (4, 5))  # the clients of each site


def engine():
    return LocalEngine(device="cpu", dtype=torch.float64, strategy="loop eager")


class Rehearsal:
    """Sites and their coordinator, who share nothing but messages."""

    def __init__(self, folder, *, rounds=3, groups=GROUPS, task=None):
        self.task, self.folder, self.rounds = task or build_task(), folder, rounds
        self.places = {f"site-{number}": Place(clients=[*group]) for number, group in enumerate(groups)}
        facts = self.task.public_facts(0)
        self.terms = write_terms(facts, self.places, rounds=rounds, largest=facts.largest)
        self.key = Key.make("coordinator")
        self.federation = Federation.begin(self.terms, self.key)
        self.keys = {name: Key.make(name) for name in self.places}
        self.sites = {name: self.site(name) for name in self.places}

    def site(self, name, **more):
        own = self.task.of(np.array(self.places[name].clients))
        more = {"engine": engine(), "needs_validation": False, **more}
        return Site(self.keys[name], lambda *_: own, self.folder / name, **more)

    def elsewhere(self):
        task = self.task
        return task_elsewhere(
            task.name, task.network, task.x[0], task.y[0], clients=task.clients, classes=task.classes,
            training=task.training, public=task.public,
        )  # fmt: skip

    def engine(self, transport=None, journal=None, **more):
        transport, journal = transport or InProcess(self.sites), journal or Journal()
        return SitesEngine(self.federation, transport, journal, engine=engine(), **more)

    def run(self, method, *, transport=None, journal=None, **more):
        sites = self.engine(transport, journal, metric=more.get("metric", "auto"))
        return federate(self.elsewhere(), method, engine=sites, rounds=self.rounds, seed=0, **more)

    def simulate(self, method, **more):
        return federate(self.task, method, engine=engine(), rounds=self.rounds, seed=0, **more)
