"""Interpolation, by hand: c = 1, 3, both models begin at 0, steps are 0.5, weights 1 and 3."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.interp import Interp
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client.losses import losses_of


@pytest.fixture
def with_validation(two_clients: Task) -> Task:
    """All samples of a client are the same here, so that the training samples can also be the validation samples."""
    return replace(two_clients, splits={**two_clients.splits, "val": two_clients.splits["train"]})


def deployed(task: Task, algorithm: Interp, rounds: int = 1, **more) -> list[float]:
    return [model["w"].item() for model in personal_models(play(task, algorithm, rounds, **more))]


def test_one_round_by_hand(two_clients: Task) -> None:
    # v = 0.5, 1.5 and w = 1.25.
    assert deployed(two_clients, Interp(share=0.4)) == pytest.approx([0.4 * 0.5 + 0.6 * 1.25, 0.4 * 1.5 + 0.6 * 1.25])


def test_validation_data_choose_the_share(with_validation: Task) -> None:
    # 1.25 - 0.75 a is nearest to 1 at a = 0.3; 1.25 + 0.25 a is nearest to 3 at a = 1.
    assert deployed(with_validation, Interp(adapt="grid")) == pytest.approx([1.25 - 0.75 * 0.3, 1.5])


def test_the_share_is_chosen_anew_when_the_shared_model_moves(with_validation: Task) -> None:
    # Only client 1 takes part in round 2: w = 1.125 + 1 = 2.125 while v_0 = 0.5 stays; 2.125 - 1.625 a = 1 near 0.7.
    method = Interp(adapt="grid", begin="own")
    gone = deployed(with_validation, method, rounds=2, faults=lambda round, clients: (clients == 0) & (round == 1))
    assert gone[0] == pytest.approx(2.125 - 1.625 * 0.7)


def test_without_validation_data_the_shared_model_is_used(two_clients: Task) -> None:
    assert deployed(two_clients, Interp()) == pytest.approx([1.25, 1.25])
    assert deployed(two_clients, Interp(adapt="grid")) == pytest.approx([1.25, 1.25])


def mixed(c: float, w: float, v: float, d: float = 0.5) -> float:
    """P by hand: a = d l(w) / (d l(w) + (1 - d) l(v)) with l(u) = (u - c)^2 / 2."""
    of_w, of_v = d * (w - c) ** 2, (1 - d) * (v - c) ** 2
    a = of_w / (of_w + of_v)
    return a * v + (1 - a) * w


def test_the_better_model_counts_more(with_validation: Task) -> None:
    # The samples have no classes, so d = 1/2. After round 1 v = c / 2 and w = 1.25: a = 1/5 for c = 1, 49/85 for 3.
    assert deployed(with_validation, Interp()) == pytest.approx([1.25 - 0.75 / 5, 1.25 + 0.25 * 49 / 85])


def test_the_mixture_is_trained_on(with_validation: Task) -> None:
    # catches: a mixture that is deployed only. Round 2: v goes half the way from P to c; w = 1.25 / 2 + 1.25 = 1.875.
    expected = []
    for c in (1.0, 3.0):
        P = mixed(c, 1.25, c / 2)
        expected.append(mixed(c, 1.875, (P + c) / 2))
    assert deployed(with_validation, Interp(), rounds=2) == pytest.approx(expected)
    apart = deployed(with_validation, Interp(begin="own"), rounds=2)
    assert apart == pytest.approx([mixed(c, 1.875, 0.75 * c) for c in (1.0, 3.0)])


def labelled(make_task: Callable[..., Task], labels: list[list[int]]) -> Task:
    """Clients whose training samples have these classes; each validates on what it trains on."""
    task = make_task(dtype=torch.float64, sizes=[len(one) for one in labels])
    task = replace(task, y=torch.tensor([y for one in labels for y in one]))
    return replace(task, splits={**task.splits, "val": task.splits["train"]})


def test_who_has_other_classes_than_everybody_has_more_of_its_own(make_task, make_cohort) -> None:
    # Of 12 samples 6 are of class 0, 4 of 1 and 2 of 2.
    task = labelled(make_task, [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1], [2, 2]])
    share = torch.tensor([[4, 2, 0], [2, 2, 0], [0, 0, 2]], dtype=torch.float64)
    everybody = share.sum(0) / 12
    d = (share / share.sum(1, keepdim=True) - everybody).abs().sum(1) / 2
    assert d.tolist() == pytest.approx([1 / 6, 1 / 6, 5 / 6])
    report = play(task, Interp())
    torch.testing.assert_close(report.server.classes / report.server.classes.sum(), everybody)
    cohort = make_cohort(task)
    v = cohort.stacked(report.server.w).map(lambda leaf: 1.5 * leaf)
    of_w, of_v = losses_of([report.server.w, v], cohort, "val").unbind(1)
    expected = d * of_w / (d * of_w + (1 - d) * of_v)
    torch.testing.assert_close(Interp().find(report.server, v, cohort), expected)
    assert expected.min() > 0


def test_where_all_have_the_same_classes_it_is_fedavg(make_task) -> None:
    task = labelled(make_task, [[0, 1, 2]] * 3 + [[0, 0, 1, 1, 2, 2]])
    mine, plain = (personal_models(play(task, one, rounds=3)) for one in (Interp(), FedAvg()))
    for a, b in zip(mine, plain, strict=True):
        for name in b:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_client_that_never_took_part_uses_the_shared_model(with_validation: Task, share: float | None) -> None:
    # The first client alone makes w = 0.75 in two rounds.
    models = deployed(with_validation, Interp(share=share), rounds=2, faults=lambda round, clients: clients == 1)
    assert models[1] == pytest.approx(0.75)


def test_the_ends_are_fedavg_and_local(two_clients: Task) -> None:
    for share, other in ((0.0, FedAvg(epochs=2)), (1.0, Local(epochs=2))):
        mine, theirs = (
            personal_models(play(two_clients, one, rounds=3)) for one in (Interp(share=share, epochs=2), other)
        )
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_one_model_travels(two_clients: Task) -> None:
    interp, plain = (play(two_clients, one, rounds=2) for one in (Interp(adapt="grid"), FedAvg()))
    assert torch.equal(interp.server.w["w"], plain.server["w"])
    up, expected = ([one for one in report.ledger.entries if one.direction == "up"] for report in (interp, plain))
    assert up == expected


def test_classes_travel_only_where_they_decide(make_task) -> None:
    task = labelled(make_task, [[0, 1, 2], [0, 0], [1, 2]])
    for method, fields in ((Interp(), {"delta", "classes", "weight"}), (Interp(share=0.5), {"delta", "weight"})):
        report = play(task, method)
        assert {one.field for one in report.ledger.entries if one.direction == "up"} == fields
        assert {*method.sends, "weight"} == fields
