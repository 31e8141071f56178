"""Personal models of a site, exported like those of any run: weights, preprocessing, class names, a loader."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
from torch import Tensor

from atoll.data.task import Task
from atoll.deploy.messages import Message
from atoll.deploy.site import Site
from atoll.deploy.work import write_method
from atoll.export.deployed import deploy
from atoll.export.folder import MOST, Judging, export_model, find_format
from atoll.export.model import ClientModel
from atoll.federation.models import name_folders
from atoll.metrics.measures import OWN, measure_of


def save_models(
    site: Site,
    message: Message,
    folder: Path,
    *,
    format: str = "safetensors",  # noqa: A002 - the word users know
    int8: bool = False,
) -> dict[str, Path]:
    """Export the model of each of a site's clients after the result was applied; return the folders by client."""
    received, population = site.open_result(message)
    own, order, form = site.own_task(received), received.order, find_format(format)
    numbers, places = received.own.tolist(), name_folders(own, np.arange(own.clients))
    saved: dict[str, Path] = {}
    made = deploy(site.engine, population, order.method, order.broadcast, received.own, round=order.round)
    for client, predictor, network in made:
        row = numbers.index(client)
        model = ClientModel.of(predictor, network, population.facts, own.preprocessing(row))
        facts = {
            "client": {"name": own.client_name(row), "number": client, "took_part": True},
            "method": {**write_method(order.method), "rounds": received.terms.rounds, "seed": received.terms.seed},
            "made_by": {"atoll": metadata.version("atoll"), "federation": message.header.federation},
        }
        judging = _judge(own, model, row)
        saved[own.client_name(row)] = export_model(model, folder / places[row], form, judging, facts, int8=int8).folder
    return saved


def _judge(own: Task, model: ClientModel, row: int) -> Judging:
    """Return the samples that a client's files are tried on."""

    def take(split: str) -> tuple[Tensor, Tensor]:
        mine = own.splits[split].of(np.array([row])).order
        return model.unscale(own.x[mine]), own.y[mine]

    return Judging(measure_of(OWN, model.rule.network), take("train")[0][:MOST], *take("val"))
