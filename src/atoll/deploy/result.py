"""What a site has in the end: the personal models of its clients and their scores, in a folder of its own.

NAME.safetensors    the model that client NAME deploys, with what its rule needs beside it
result.json         method, model, schema, mean and spread of every number, and scores on the client's own samples
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.torch import save
from torch import Tensor

from atoll.compose import to_record
from atoll.deploy.messages import Message
from atoll.deploy.site import Site
from atoll.deploy.work import AssignedJob
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import DeployError
from atoll.kernel.job import AtTheEnd, Lost
from atoll.kernel.params import Stack, Tree
from atoll.kernel.predictor import predictor_of
from atoll.metrics.evaluation import evaluate
from atoll.records.files import write_record
from atoll.runtime.files import write_whole


@dataclass(frozen=True)
class Personalize(AtTheEnd):
    """Clients make the models that they deploy."""

    name: ClassVar[str] = "personalize"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Tree]:
        """Return the models and what stands beside them."""
        made = predictor_of(method.personalize(received, cohort))
        return {"model": made.model, "beside": made.beside}


def write_result(site: Site, message: Message, folder: Path) -> Path:
    """Write the models and scores of a site after the last round; return the file that describes them."""
    received, population = site.open_result(message)
    order, own = received.order, received.own
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, str] = {}
    for job in order.jobs(Personalize()):
        assert isinstance(job, AssignedJob)
        for outcome in site.engine.run(job, population):
            if isinstance(outcome, Lost):
                raise DeployError(f"Every client must be able to make its model. {outcome.reason}.")
            for row, client in enumerate(outcome.clients.tolist()):
                files[client] = f"{_file_name(population.task.client_name(client))}.safetensors"
                write_whole(folder / files[client], save(_leaves_of(outcome.result, row)))
    scores = evaluate(
        site.engine, population, order.method, order.broadcast, round=order.round, clients=np.sort(own)
    )  # fmt: skip
    clients: dict[str, Any] = {}
    for place, client in enumerate(np.sort(own).tolist()):
        name = population.task.client_name(client)
        clients[name] = {"model": files[client]} | {
            split: {
                "score": _number(one.score[place]), "loss": _number(one.loss[place]), "samples": int(one.samples[place])
            }
            for split, one in scores.items()
        }  # fmt: skip
        if population.task.scaling is not None:
            clients[name]["preprocessing"] = population.task.preprocessing(_place_of(client, own)).as_json()
    about = {
        "federation": message.header.federation, "round": order.round, "method": to_record(order.method),
        "network": received.terms.model, "site": received.site, "clients": clients,
    }  # fmt: skip
    write_record(folder / "result.json", about)
    return folder / "result.json"


def _place_of(client: int, own: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Return the number of a client among the site's own."""
    return int(np.flatnonzero(own == client)[0])


def _leaves_of(result: dict[str, Tree], row: int) -> dict[str, Tensor]:
    """Return one client's tensors by name: of its model, and of what stands beside it."""
    found: dict[str, Tensor] = {}
    for part, prefix in (("model", ""), ("beside", "beside.")):
        values: Any = result[part]
        for name, leaf in values.items():
            found[f"{prefix}{name}"] = (leaf[row] if isinstance(values, Stack) else leaf).cpu().contiguous()
    return found


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _file_name(name: str) -> str:
    """Return a client's name as a file may be called."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:100]
