"""FEDORA, by hand: c = 1, 3, both models begin at 0, steps are 0.5; validation samples are the training samples."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll import Report, Stack, Task
from atoll.algorithms.fedora import Fedora
from atoll.algorithms.local import Local
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import CohortError, HyperparameterError, TaskError
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator, generator
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics

THREE = torch.tensor([[1.0], [3.0], [2.0]], dtype=torch.float64)


def validated(task: Task) -> Task:
    """The same task, in which the training samples are those for validation, too."""
    return replace(task, splits={**task.splits, "val": task.splits["train"]})


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def strengths(task: Task, algorithm: Fedora, v: list[float], G: list[float], make_cohort) -> list[float]:
    as_stack = lambda values: Stack.of(w=torch.tensor(values, dtype=torch.float64)[:, None])  # noqa: E731
    return algorithm.strength(as_stack(v), as_stack(G), make_cohort(task)).tolist()


@dataclass(frozen=True, kw_only=True)
class Same(Fedora):
    """FEDORA with one lambda for all."""

    lam: float = 1.0

    def strength(self, v: Stack, G: Stack, cohort: Cohort) -> Tensor:
        return torch.full((len(cohort),), self.lam, dtype=torch.float64)


# -- rounds --------------------------------------------------------------------------------------------------------


def test_two_rounds_by_hand(two_clients: Task) -> None:
    # Each links to the other: P = (1, a; a, 1) / (1 + a). First G = v = 0, so that all train alone: v = 0.5, 1.5.
    # Then G = 0.944, 1.056: better for the first client, worse for the second, whose gate stays shut.
    report = play(validated(two_clients), Fedora(), rounds=2)
    G = (0.5 + 0.8 * 1.5) / 1.8
    lam = math.exp((0.5 * 0.25 - 0.5 * (G - 1) ** 2) / 2)
    assert deployed(report) == pytest.approx([0.5 + 0.25 - 0.5 * lam * (0.5 - G), 1.5 + 0.75])
    assert [line["observed"]["lam"] for line in report.history] == [{"0": 0, "1": 0}, {"0": pytest.approx(lam), "1": 0}]


def test_the_pull_is_outside_of_momentum_and_starts_from_before_the_step(two_clients: Task) -> None:
    # catches: implementations that add lam (v - G) to the gradient, where momentum carries it on.
    task = replace(two_clients, training=replace(two_clients.training, momentum=0.9))
    v, velocity, G = 0.0, 0.0, 0.0
    for _ in range(3):
        velocity = 0.9 * velocity + (v - 1)
        v = v - 0.5 * velocity - 0.5 * 0.3 * (v - G)
    assert deployed(play(task, Same(lam=0.3, epochs=3)))[0] == pytest.approx(v)


def test_no_gradient_is_taken_of_what_was_received(two_clients: Task) -> None:
    # catches: the released code, which also trains G_k in every round and throws the result away.
    task = validated(two_clients)
    mine, theirs = (play(task, one, rounds=2).history[-1]["gradients"] for one in (Fedora(), Local()))
    assert mine == theirs == 2


# -- the gate ------------------------------------------------------------------------------------------------------


def test_the_gate_opens_as_far_as_the_loss_falls(two_clients: Task, make_cohort) -> None:
    found = strengths(validated(two_clients), Fedora(), [0.0, 0.0], [0.6, -0.1], make_cohort)
    assert found == pytest.approx([math.exp((0.5 - 0.5 * 0.4**2) / 2), 0])


def test_equal_losses_leave_the_strict_gate_shut_and_open_the_official_one(two_clients: Task, make_cohort) -> None:
    # catches: the released code's gate, under which clients that receive nothing new are held back by lam = 1.
    task = validated(two_clients)
    v, G = [0.0, 0.0], [2.0, 0.0]  # the same distance from c = 1; and the same model
    assert strengths(task, Fedora(gate="strict"), v, G, make_cohort) == [0, 0]
    assert strengths(task, Fedora(gate="official"), v, G, make_cohort) == [1, 1]


def test_alone_the_strict_gate_is_local_and_the_official_one_is_not(two_clients: Task) -> None:
    task = validated(two_clients)
    local, strict, official = (
        deployed(play(task, one, rounds=3))
        for one in (Local(epochs=2), Fedora(alpha=0.0, epochs=2), Fedora(alpha=0.0, epochs=2, gate="official"))
    )
    assert strict == local
    # The second step of a round is pulled back to its start: 0.5 -> 0.75 - 0.25.
    assert deployed(play(task, Fedora(alpha=0.0, epochs=2, gate="official")))[0] == pytest.approx(0.5)
    assert official[0] < local[0]


def test_lambda_has_a_ceiling(two_clients: Task, make_cohort) -> None:
    task, v, G = validated(two_clients), [0.0, -9.0], [1.0, 3.0]
    assert strengths(task, Fedora(), v, G, make_cohort) == pytest.approx([math.exp(0.25), 2])  # 1 / eta
    assert strengths(task, Fedora(lam_max=1.1), v, G, make_cohort) == pytest.approx([1.1, 1.1])
    assert Fedora(lam_max=6.0).pulls(lr=0.5) == {"lr * lam_max": 3.0}
    assert Fedora().pulls(lr=0.5) == {}


def test_without_validation_samples_all_train_alone_which_is_said(two_clients: Task, caplog) -> None:
    mine = deployed(play(two_clients, Fedora(), rounds=3))
    assert mine == deployed(play(two_clients, Local(), rounds=3))
    assert "no client has validation samples" in caplog.text


# -- who learns from whom ------------------------------------------------------------------------------------------


def test_clients_link_to_those_with_similar_samples() -> None:
    # Samples are (c, 1): their directions have angles 0, 5, 80 and 85 degrees.
    angles = torch.tensor([90.0, 85.0, 10.0, 5.0], dtype=torch.float64).deg2rad()
    task = quadratics(1 / angles.tan()[:, None], lr=0.5)
    report = play(task, Fedora(topk=1, alpha=0.5))
    expected = torch.tensor([[2.0, 1, 0, 0], [1, 2, 0, 0], [0, 0, 2, 1], [0, 0, 1, 2]]).double() / 3
    torch.testing.assert_close(report.algorithm.mixing(report.server), expected)


def test_who_was_never_heard_of_is_left_out_and_rows_sum_to_one(two_clients: Task) -> None:
    def second_is_lost(round: int, clients: np.ndarray) -> np.ndarray:
        return clients == 1

    report = play(validated(two_clients), Fedora(), rounds=2, faults=second_is_lost)
    assert report.algorithm.mixing(report.server).tolist() == [[1, 0], [0, 1]]
    # The first one's gate is shut, because G = v. The second never came: it has what would reach it on its arrival.
    assert deployed(report) == pytest.approx([0.75, 0.75])


def test_a_client_that_trains_for_the_first_time_begins_at_what_it_receives(two_clients: Task) -> None:
    # Round 0 leaves v = 0.5 with the first client. The second one begins there: 0.5 - 0.5 (0.5 - 3); its gate is shut.
    task = validated(two_clients)
    report = play(task, Fedora(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 0))
    assert deployed(report) == pytest.approx([0.75, 1.75])
    assert report.server.v["w"].flatten().tolist() == pytest.approx([0.75, 1.75])


def test_a_client_that_never_trained_has_statistics_of_its_own_samples(make_task) -> None:
    body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    task = make_task(lambda: body, dtype=torch.float64)
    report = play(task, Fedora(), rounds=2, faults=lambda round, clients: clients > 1)
    third, fourth = personal_models(report)[2:]
    assert not torch.equal(third["1.running_mean"], fourth["1.running_mean"])
    for client, model in ((2, third), (3, fourth)):
        x = task.x[task.splits["train"].order[slice(*task.splits["train"].offsets[client : client + 2])]]
        mean = (x @ model["0.weight"].T + model["0.bias"]).mean(0)
        torch.testing.assert_close(model["1.running_mean"], mean, rtol=0.0, atol=0.2)
        assert (model["1.running_mean"] - mean).norm() < 0.3 * mean.norm()


def test_the_last_model_of_an_absent_client_still_counts(two_clients: Task) -> None:
    report = play(
        validated(two_clients), Fedora(), rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0)
    )
    assert report.server.v["w"].flatten().tolist() == pytest.approx([deployed(report)[0], 1.5])
    assert report.algorithm.mixing(report.server)[0, 1] == pytest.approx(0.8 / 1.8)


def test_fewer_clients_than_topk_all_link_to_each_other(two_clients: Task, caplog) -> None:
    report = play(two_clients, Fedora(topk=5))
    assert report.server.P[0].tolist() == pytest.approx([1 / 1.8, 0.8 / 1.8])
    assert "topk=5: there are 2 clients" in caplog.text
    assert play(quadratics(THREE[:1]), Fedora()).server.P.tolist() == [[1]]


def test_a_client_whose_exchange_failed_has_itself_and_nobody_links_to_it() -> None:
    replies = play(quadratics(THREE), Fedora(topk=1)).server  # as a template
    scores, there = torch.ones(3, 3, dtype=torch.float64), torch.tensor([True, False, True])
    found = Fedora(topk=1)._propagation(scores, there, replies.P)
    assert found[1].tolist() == [0, 1, 0]
    assert found[:, 1].tolist() == [0, 1, 0]


@pytest.mark.parametrize("seed", range(12))
def test_nobody_learns_from_those_to_whom_no_link_leads(seed: int) -> None:
    # catches: a client all of whose friends were silent, that has a stranger's model in the place of its own
    clients, draw = 12, generator(seed, "islands")
    report = play(quadratics(torch.arange(float(clients), dtype=torch.float64)[:, None]), Fedora(topk=1))
    scores = torch.from_numpy(draw.random((clients, clients)))
    everybody, seen = torch.ones(clients, dtype=torch.bool), torch.from_numpy(draw.random(clients) < 0.3)
    P = Fedora(topk=1)._propagation(scores, everybody, report.server.P)
    found = report.algorithm.mixing(replace(report.server, P=P, seen=seen))
    best = scores.fill_diagonal_(-1).argmax(1).tolist()
    for client in range(clients):
        heard = {client}
        while (following := {best[other] for other in heard}) - heard:
            heard |= following
        learned = [other for other in sorted(heard) if seen[other]] or [client]
        assert found[client].nonzero().flatten().tolist() == learned


def test_loss_finds_whose_models_do_well_here() -> None:
    # After one step from 0 the probes are c / 2. On c = 1 that of c = 3 is best (1.5 is as far as 0.5), on 3 it is 1.5.
    optima = torch.tensor([[1.0], [-1.0], [1.2], [-1.2]], dtype=torch.float64)
    task = validated(quadratics(optima, lr=0.5))
    report = play(task, Fedora(similarity="loss", topk=1, alpha=0.5))
    expected = torch.tensor([[2.0, 0, 1, 0], [0, 2, 0, 1], [1, 0, 2, 0], [0, 1, 0, 2]]).double() / 3
    torch.testing.assert_close(report.server.P, expected)
    assert report.algorithm.broadcast(report.server) is None


def test_labels_tell_clients_apart_that_call_the_same_samples_by_other_names() -> None:
    # Two classes at (10, -2) and (10, 2), in noise; in the second half of the clients their names are exchanged.
    draw, data = generator(1, "concept"), {}
    for client in range(8):
        y = np.arange(20) % 2
        x = np.stack([np.full(20, 10.0), 4.0 * y - 2], 1) + draw.normal(size=(20, 2))
        data[str(client)] = (x, y if client < 4 else 1 - y)
    with default_generator(0):
        task = Task.of_clients(data, torch.nn.Linear(2, 2).double(), classes=2)
    across = (torch.arange(8)[:, None] < 4) != (torch.arange(8) < 4)
    blind, aware = (
        (play(task, Fedora(similarity=one), rounds=1).server.P * across).sum(1).mean()
        for one in ("subspace", "labels")  # type: ignore[arg-type]
    )
    assert aware == 0
    assert blind > 0.2  # catches: similarity that is blind to concept shift


# -- what travels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3])
def test_the_exchange_costs_two_bases(make_task, q: int) -> None:
    task = make_task()  # 4 features, 3 classes
    ledger = play(task, Fedora(q=q)).ledger
    before = [entry for entry in ledger.entries if entry.round < 0]
    like = Params.of(basis=torch.zeros(1, q, 4 + 3).double(), plain=torch.zeros(1, q, 4).double())
    assert {(entry.direction, entry.field, entry.kind) for entry in before} == {("up", "bases", "statistic")}
    assert {entry.bytes for entry in before} == {len(to_bytes(like))}


def test_afterwards_a_mixture_goes_down_and_a_model_comes_up(two_clients: Task) -> None:
    report = play(two_clients, Fedora(), rounds=2)
    model = len(to_bytes(two_clients.network.initial))
    costs = {direction: sum(e.bytes * len(e.clients) for e in report.ledger.entries if e.direction == direction and
             e.round >= 0) for direction in ("up", "down")}  # fmt: skip
    assert costs == {"up": 2 * 2 * model, "down": 2 * 2 * model}


def test_loss_takes_two_exchanges_and_everybodys_model_goes_down() -> None:
    task = quadratics(THREE)
    ledger = play(task, Fedora(similarity="loss")).ledger
    before = [(entry.round, entry.direction, entry.field) for entry in ledger.entries if entry.round < 0]
    assert sorted(set(before)) == [
        (-2, "up", "bases"), (-2, "up", "probe"), (-1, "down", "broadcast"), (-1, "up", "loss"),
    ]  # fmt: skip
    down = next(entry for entry in ledger.entries if entry.field == "broadcast")
    assert down.bytes == len(to_bytes(Stack.of(w=THREE) | Stack({}, task.network.layout)))


def test_noise_changes_what_is_sent_and_is_the_same_with_the_same_seed(make_task) -> None:
    task = make_task()
    quiet, noisy, again = (play(task, one).server.bases["plain"] for one in (Fedora(), *[Fedora(noise=0.5)] * 2))
    assert torch.equal(noisy, again)
    assert not torch.allclose(quiet, noisy)
    torch.testing.assert_close(noisy.norm(dim=-1), torch.ones(4, 1, 1).double())


# -- new clients ---------------------------------------------------------------------------------------------------


def circle(angles: list[float]) -> Task:
    """Samples in these directions; the second feature is y, so that samples alone say less than with labels."""
    return quadratics(1 / torch.tensor(angles, dtype=torch.float64).deg2rad().tan()[:, None], lr=0.5)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_new_client_gets_what_its_neighbour_gets(make_cohort, labelled: bool) -> None:
    # r = e_2 (topk = 1), so that G = row 2 of P V; its number, 0, is a row of nobody's.
    algorithm = Fedora(topk=1, alpha=0.5)
    server = play(circle([90.0, 80.0, 20.0, 10.0]), algorithm).server
    model = algorithm.welcome(server, make_cohort(circle([18.0])).without(*[] if labelled else ["labels"]))
    expected = (server.P @ server.v["w"])[2]
    torch.testing.assert_close(model["w"][0], expected)


def test_labels_decide_whom_a_new_client_is_like(make_task, make_cohort) -> None:
    task = make_task(sizes=(20, 20), classes=2, dtype=torch.float64)
    x = torch.ones_like(task.x) + 0.01 * task.x
    y = task.splits["train"].order // 20  # the first client has class 0 only, the second class 1
    task = replace(task, x=x, y=torch.empty_like(task.y).index_copy(0, task.splits["train"].order, y))
    algorithm = Fedora(similarity="labels", topk=1, alpha=0.0)
    server = play(task, algorithm).server
    second = make_cohort(task, clients=[1])
    models = algorithm.welcome(server, second)
    torch.testing.assert_close(models["head.bias"][0], server.v["head.bias"][1])


def test_by_loss_a_labelled_new_client_tries_everybodys_model(make_cohort) -> None:
    algorithm = Fedora(similarity="loss", topk=1, alpha=0.0)
    server = play(quadratics(torch.tensor([[1.0], [-1.0]], dtype=torch.float64), lr=0.5), algorithm).server
    model = algorithm.welcome(server, make_cohort(quadratics(torch.tensor([[-0.9]], dtype=torch.float64))))
    assert model["w"].item() == pytest.approx(-0.5)


def test_a_new_client_is_tuned_under_the_gate(two_clients: Task, make_cohort) -> None:
    # Its G is what it was given. v = 0, 2.8 with c = 1, 3: G = 0.4 is better for the first client, not for the second.
    task, values = validated(two_clients), torch.tensor([[0.0], [2.8]], dtype=torch.float64)
    given, v = Stack.of(w=torch.full_like(values, 0.4)), Stack.of(w=values)
    given, v = (Stack(one, task.network.layout) for one in (given, v))
    found = Fedora().tune_newcomer(given, v, make_cohort(task), epochs=2, stream="tune")
    lam = math.exp((0.5 - 0.5 * 0.6**2) / 2)
    first, second = 0.0, 2.8
    for _ in range(2):
        first, second = first - 0.5 * (first - 1) - 0.5 * lam * (first - 0.4), second - 0.5 * (second - 3)
    assert found["w"].flatten().tolist() == pytest.approx([first, second])
    alone = Fedora(lam_max=0.0).tune_newcomer(given, v, make_cohort(task), epochs=2, stream="tune")
    assert alone["w"].flatten().tolist() == pytest.approx([0.75, 2.95])


def test_a_new_client_with_samples_of_another_shape_is_refused(two_clients: Task, make_cohort) -> None:
    server = play(two_clients, Fedora()).server
    other = quadratics(torch.ones(1, 2, dtype=torch.float64))
    with pytest.raises(CohortError, match="bases of one shape"):
        Fedora().welcome(server, make_cohort(other))


def test_batchnorm_of_a_new_client_meets_its_samples(make_task, make_cohort) -> None:
    body = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    task = make_task(lambda: body, dtype=torch.float64)
    report = play(task, Fedora(), rounds=2)
    assert set(report.server.v) == set(task.network.initial.trained)
    for labelled in (True, False):
        model = Fedora().welcome(report.server, make_cohort(task).without(*[] if labelled else ["labels"]))
        assert not torch.equal(model["1.running_mean"][0], model["1.running_mean"][2])
        assert model["1.num_batches_tracked"].dtype == torch.int64


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [{"alpha": 1.0}, {"alpha": -0.1}, {"topk": 0}, {"q": 0}, {"lam_max": -1.0}, {"noise": -1.0}, {"temperature": -1.0}],
    ids=str,
)
def test_bad_values_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(HyperparameterError, match="must be"):
        Fedora(**bad)  # type: ignore[arg-type]


def test_a_centred_private_basis_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="must be 0 with center=True"):
        Fedora(center=True, noise=0.1)


def test_classes_are_needed_for_similarity_by_class(two_clients: Task) -> None:
    with pytest.raises(TaskError, match="one class per sample.*\nhint: .*similarity=loss"):
        play(two_clients, Fedora(similarity="labels"))


def test_samples_must_be_numbers(two_clients: Task) -> None:
    with pytest.raises(TaskError, match=r"samples of numbers.*int64.*\nhint: .*features=encoder"):
        Fedora().start(replace(two_clients, x=two_clients.x.long(), network=two_clients.network).public_facts())
