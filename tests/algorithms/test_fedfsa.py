"""FedFSA, by hand, on f(u, h) = (u + h - c)^2 / 2: both leaves have the gradient u + h - c, and both are a layer.

With radii r sqrt(2), a leaf moves by r in the direction of its gradient.
"""

import json

import pytest
import torch
from torch import nn

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedfsa import FedFSA
from atoll.algorithms.mofedsam import MoFedSAM
from atoll.kernel.errors import HyperparameterError
from atoll.testing.conformance import personal_models, play

NEAR = {"abs": 1e-6}  # 1e-7 is added to the norm of a gradient
ROOT = 2**0.5
METHOD = FedFSA(
    rho=0.1 * ROOT, rho_larger=0.3 * ROOT, top_c=1, alpha=1.0, sensitivity="raw", epochs=1, head_epochs=0
)  # fmt: skip


def kept(report) -> dict[str, torch.Tensor]:
    return report.population.memory.save(round=report.settings.rounds)["kept"]


def test_in_the_first_round_all_radii_are_the_smaller_one(body_and_head: Task) -> None:
    # u + h climbs to -0.2: both leaves step to 0.6 and 1.6; weights 1/4 and 3/4.
    report = play(body_and_head, METHOD)
    w = report.server.w
    assert [w["body.value"].item(), w["head.value"].item()] == pytest.approx([1.35, 1.35], **NEAR)
    assert kept(report)["body.value"].tolist() == pytest.approx([0.36, 2.56], **NEAR)  # what it changed, squared


def test_then_the_most_sensitive_layer_climbs_further(body_and_head: Task) -> None:
    # u + h = 2.7 climbs by 0.3 + 0.1: gradients 2.1 and -0.7, whose weighted mean is 0. With one radius: 1.9 and -0.5.
    w = play(body_and_head, METHOD, rounds=2).server.w
    assert [w["body.value"].item(), w["head.value"].item()] == pytest.approx([1.35, 1.35], **NEAR)


def test_an_absent_client_keeps_its_choice(body_and_head: Task) -> None:
    # The second client misses round 1, so that in round 2 its radii are still the smaller ones.
    # Round 1: u = h = 0.6. Round 2 from 1.2: 0.2 + 0.4 and -1.8 - 0.2; steps -0.3 and 1.
    report = play(body_and_head, METHOD, rounds=2, faults=lambda round, clients: (round == 0) & (clients == 1))
    assert report.server.w["body.value"].item() == pytest.approx(0.6 - 0.25 * 0.3 + 0.75 * 1.0, **NEAR)


def test_the_smaller_radius_is_also_that_of_leaves_which_are_no_layers(make_task) -> None:
    # One layer, chosen, and its bias: the first round is MoFedSAM's, the second is not that of either radius.
    task = make_task(lambda: nn.Linear(4, 3), dtype=torch.float64)
    method = FedFSA(rho=0.1, rho_larger=0.9, top_c=1, head_epochs=0)
    mine, small, large = (
        [play(task, one, rounds).server.w["bias"] for rounds in (1, 2)]
        for one in (method, MoFedSAM(rho=0.1), MoFedSAM(rho=0.9))
    )
    assert torch.equal(mine[0], small[0])
    assert all((mine[1] - other[1]).abs().max() > 1e-6 for other in (small, large))


def test_heads_are_tuned_from_the_shared_model(body_and_head: Task) -> None:
    # u + h = 2.7, one step of size 0.5 on the head alone: 1.35 - 0.85 and 1.35 + 0.15.
    report = play(body_and_head, FedFSA(**{**vars(METHOD), "head_epochs": 1}))
    models = personal_models(report)
    assert [model["head.value"].item() for model in models] == pytest.approx([0.5, 1.5], **NEAR)
    assert [model["body.value"].item() for model in models] == pytest.approx([1.35, 1.35], **NEAR)
    assert report.algorithm.shared(report.server) is report.server.w


@pytest.mark.parametrize("sensitivity", ["minmax", "raw", "relative", "loss"])
def test_every_sensitivity_is_a_number_for_each_client_and_layer(make_task, sensitivity: str) -> None:
    task = make_task(dtype=torch.float64)
    report = play(task, FedFSA(sensitivity=sensitivity), rounds=2)
    found = kept(report)
    assert len(found) == 2
    assert all(value.shape == (task.clients,) and (value > 0).all() for value in found.values())


def test_the_loss_costs_one_more_gradient_for_each_batch(make_task) -> None:
    task = make_task(dtype=torch.float64)
    free, dear = (play(task, FedFSA(sensitivity=one)).history[0]["gradients"] for one in ("minmax", "loss"))
    assert dear == free * 3 / 2


def test_the_run_holds_the_sensitivities_of_every_client(body_and_head: Task, tmp_path) -> None:
    report = play(body_and_head, METHOD, rounds=2, folder=tmp_path / "run")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(last["observed"]) == ["sensitivity/body.value", "sensitivity/head.value"]
    newest = kept(report)["body.value"].tolist()
    assert last["observed"]["sensitivity/body.value"] == {"0": newest[0], "1": newest[1]}
    assert list(last["loss"]) == ["loss/main"]


def test_sensitivities_stay_with_the_client(body_and_head: Task) -> None:
    mine, plain = (play(body_and_head, one) for one in (METHOD, MoFedSAM()))
    assert mine.ledger.by_kind() == plain.ledger.by_kind()


def test_there_must_be_as_many_layers(body_and_head: Task) -> None:
    message = r"`top_c` of FedFSA must be at most the number of the model's layers, 2\. Got 3\."
    with pytest.raises(HyperparameterError, match=message):
        play(body_and_head, FedFSA(top_c=3))


@pytest.mark.parametrize("name", ["rho", "rho_larger"])
def test_a_radius_is_not_negative(name: str) -> None:
    with pytest.raises(HyperparameterError, match=rf"`{name}` of FedFSA must be a float in \[0, inf\)\. Got -1"):
        FedFSA(**{name: -1.0})


def test_radius_zero_costs_what_fedavg_does(body_and_head: Task) -> None:
    mine, plain = (play(body_and_head, one) for one in (FedFSA(rho=0.0, rho_larger=0.0), FedAvg()))
    assert mine.history[0]["gradients"] == plain.history[0]["gradients"]
