"""The gate: a client deploys the model that it trained alone where its validation data speak for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.compose.pieces import Gate
from atoll.data.task import Training
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.predictor import Predictor
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.trees import find_difference

CLIENTS = 6
ODD = 3  # the client whose labels mean something else


def _task(shares: tuple[float, float, float] = (0.5, 0.25, 0.25)) -> Task:
    """Clients with the same kind of samples; one of them gives the classes other numbers."""
    draw, data = generator(0, "gate"), {}
    for client in range(CLIENTS):
        y = draw.integers(3, size=80)
        x = 4 * torch.eye(3).double()[y] + torch.from_numpy(draw.normal(size=(80, 3)))
        data[str(client)] = (x, torch.from_numpy((y + 1) % 3 if client == ODD else y))
    with default_generator(0):
        model = MLP((3,), 3, hidden=(8,)).double()
    return Task.of_clients(data, model, classes=3, training=Training(lr=0.1, batch_size=8), shares=shares)


def _models(name: str, task: Task | None = None, **more: object) -> list[Params]:
    return personal_models(play(task or _task(), create(name), 5, **more))


def _same(ours: Params, theirs: Params) -> bool:
    return find_difference(ours, theirs) is None


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft:tune_epochs=1"])
def test_who_is_harmed_falls_back_and_all_others_keep_the_methods_model(method: str) -> None:
    name, _, values = method.partition(":")
    offered, alone, gated = _models(method), _models("local"), _models(f"{name}+gate:margin=2,judge=score,{values}")
    assert [_same(gated[k], alone[k]) for k in range(CLIENTS)] == [k == ODD for k in range(CLIENTS)]
    assert [_same(gated[k], offered[k]) for k in range(CLIENTS)] == [k != ODD for k in range(CLIENTS)]


def test_who_falls_back_is_written_down_after_the_last_round() -> None:
    report = play(_task(), create("fedavg+gate:margin=2,judge=score"), 5, evaluation="all")
    told = [line["evaluation"].get("observed") for line in report.evaluations]
    assert told[:-1] == [None] * (len(told) - 1)
    assert told[-1]["alone"] == {str(client): float(client == ODD) for client in range(CLIENTS)}
    assert [lead > 2 for lead in told[-1]["lead"].values()] == [client == ODD for client in range(CLIENTS)]
    assert "observed" not in play(_task(), create("fedavg"), 5, evaluation="all").evaluations[-1]["evaluation"]


def test_it_never_steps_in_the_way_of_the_methods_own_work() -> None:
    """catches: FedPer begins its training at `self.personalize`, FedRep ends at `self.welcome`; none must be gated."""
    for method in ("fedper", "fedrep:final_epochs=2"):
        name, _, values = method.partition(":")
        plain, gated = (play(_task(), create(text), 4) for text in (method, f"{name}+gate:margin=0.0,{values}"))
        assert find_difference(plain.server, gated.server) is None
        kept = [report.population.memory.save(round=4)["kept"] for report in (plain, gated)]
        assert find_difference(*kept) is None


def test_the_model_of_its_own_is_that_of_local_whatever_pieces_there_are() -> None:
    for pieces in ("gate", "gate+prox", "prox+gate"):
        assert all(map(_same, _models(f"fedavg+{pieces}:margin=always"), _models("local")))
    assert all(map(_same, _models("fedavg+gate+sam"), _models("fedavg+sam+gate")))


@pytest.mark.parametrize(
    ("method", "values", "epochs"),
    [
        ("fedavg+gate", "epochs=2", 2),
        ("ditto+gate", "epochs=1,personal_epochs=2", 3),
        ("fedrep+gate", "head_epochs=3,epochs=1,final_epochs=0", 4),
        ("pfedme+gate", "inner_steps=4,epochs=2", 8),
        ("apfl+gate", "epochs=1", 2),
        ("interp+gate", "epochs=1", 2),
        ("perfedavg+gate", "order=fo", 2),
        ("fedavg+sam+gate", "epochs=2", 4),
        ("fedavg+gate+sam", "epochs=2", 4),
    ],
)
def test_it_takes_as_many_gradients_alone_as_with_the_others(method: str, values: str, epochs: int) -> None:
    """catches: a model of its own that had half of what Ditto trains, and so looked worse than it is."""
    assert all(map(_same, _models(f"{method}:{values},margin=always"), _models(f"local:epochs={epochs}")))
    taken = [
        play(_task(), create(f"{method}:{values},margin={margin}"), 1).history[0]["gradients"]
        for margin in ("never", "always")
    ]
    assert taken[1] == 2 * taken[0]


def test_an_ensemble_stands_beside_the_clients_own_model() -> None:
    """catches: an ensemble has no single model to choose in place of the client's."""
    together, alone, gated = (
        play(_task(), create(name), 1, evaluation="all")
        for name in ("ensemble", "local:epochs=10", "ensemble+gate:margin=2,judge=score")
    )
    deployed, own = personal_models(gated), personal_models(alone)
    assert [bool(model["beside.alone"]) for model in deployed] == [client == ODD for client in range(CLIENTS)]
    assert _same(deployed[ODD].only(own[ODD]), own[ODD])
    offered, mine, scores = (report.scores() for report in (together, alone, gated))
    assert scores[ODD] == mine[ODD] != offered[ODD]
    assert (scores == offered).sum() == CLIENTS - 1


def test_a_client_falls_back_only_beyond_the_margin() -> None:
    """Its twenty validation samples never count for more than sqrt(20) standard errors."""
    offered = _models("fedavg")
    assert all(map(_same, _models("fedavg+gate:margin=4.48"), offered))
    assert not _same(_models("fedavg+gate:judge=score")[ODD], offered[ODD])


def test_clients_without_validation_samples_and_new_ones_get_the_methods_model() -> None:
    task = _task((0.7, 0.0, 0.3))
    assert all(map(_same, _models("fedavg+gate", task), _models("fedavg", task)))
    report = play(_task(), create("fedavg+gate:margin=always"), 1)
    assert report.algorithm.welcome(report.server, None) is report.server


def test_clients_that_were_asked_rarely_have_trained_alone_as_rarely() -> None:
    assert all(map(_same, _models("fedavg+gate:margin=always", cohort=2), _models("local", cohort=2)))


def test_it_costs_gradients_and_no_bytes() -> None:
    plain, alone, gated = (play(_task(), create(name), 2) for name in ("ditto", "local", "ditto+gate"))
    cost = [sum(line["gradients"] for line in report.history) for report in (plain, alone, gated)]
    assert cost[2] == cost[0] + 2 * cost[1]  # alone, a client takes as many as for Ditto's two models
    assert gated.ledger.entries == plain.ledger.entries
    free = play(_task(), create("ditto+gate:margin=never"), 2)
    assert sum(line["gradients"] for line in free.history) == cost[0]


def test_a_run_is_resumed_with_the_clients_own_models(tmp_path: Path) -> None:
    straight = personal_models(play(_task(), create("fedavg+gate"), 4))
    for memory in ("ram", "disk"):
        folder = tmp_path / memory
        more = {"folder": folder, "memory": memory, "evaluation": "all", "eval_every": 1}

        def stop(line: dict) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            play(_task(), create("fedavg+gate"), 4, on_round=stop, **more)
        resumed = play(_task(), create("fedavg+gate"), 4, resume=True, **more)
        assert all(map(_same, personal_models(resumed), straight))


@dataclass(frozen=True, kw_only=True)
class Shifted(FedAvg):
    """FedAvg whose clients answer with a bias beside the model."""

    cites: ClassVar[str] = ""

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(w, Params.of(bias=torch.zeros(3).double()), _biased)


def _biased(model: Params, beside: Params, batch: Batch) -> Tensor:
    return batch.outputs(model) + beside["bias"]


def test_it_chooses_between_a_model_and_another_rule(make_cohort: Callable[..., Cohort]) -> None:
    report = play(_task(), Gate(inner=Shifted(), margin=2.0, judge="score"), 5)
    cohort = make_cohort(_task(), round=5)
    cohort._host.memory = report.population.memory  # type: ignore[attr-defined]
    deployed = report.algorithm.personalize(report.server, cohort)
    assert isinstance(deployed, Predictor)
    assert deployed.beside["alone"].tolist() == [k == ODD for k in range(CLIENTS)]
    ungated = Gate(inner=FedAvg(), margin=2.0, judge="score").personalize(report.server, cohort)
    assert all(torch.equal(deployed.model[name], leaf) for name, leaf in ungated.items())
