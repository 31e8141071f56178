import torch

from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import Penalty, linear, proximal, sgd

W = Params.of(a=torch.tensor([1.0, 2.0]), b=torch.tensor(3.0))
V = Params.of(a=torch.tensor([0.0, 1.0]), b=torch.tensor(1.0))
G = Params.of(a=torch.tensor([10.0, 20.0]), b=torch.tensor(30.0))


def values(found: Params) -> dict[str, object]:
    return {name: leaf.tolist() for name, leaf in found.items()}


def test_proximal_adds_the_way_from_its_center():
    assert values(proximal(0.5, center=V)(G, W)) == {"a": [10.5, 20.5], "b": 31.0}
    assert values(proximal(torch.tensor(0.5), center=V)(G, W)) == {"a": [10.5, 20.5], "b": 31.0}


def test_linear_adds_its_direction():
    assert values(linear(V)(G, W)) == {"a": [10.0, 21.0], "b": 31.0}


def test_penalties_add_up():
    both = linear(V) + proximal(0.5, center=V)
    assert values(both(G, W)) == {"a": [10.5, 21.5], "b": 32.0}
    assert values((both + linear(V))(G, W)) == {"a": [10.5, 22.5], "b": 33.0}


def test_proximal_leaves_alone_what_its_center_does_not_have():
    assert values(proximal(0.5, center=V.only(["b"]))(G, W)) == {"a": [10.0, 20.0], "b": 31.0}
    assert values(proximal(0.5, center=V.only([]))(G, W)) == values(G)


def test_leaves_that_are_not_trained_are_not_pulled():
    some = G.only(["b"])
    assert values(proximal(0.5, center=V)(some, W)) == {"b": 31.0}
    assert values(linear(V)(some, W)) == {"b": 31.0}


def test_it_adds_to_the_step_of_every_client_but_not_to_the_loss(make_task, make_cohort):
    task = make_task(dtype=torch.float64, batch_size=100)
    w = task.network.initial
    own = Stack({name: torch.stack([leaf + k for k in range(task.clients)]) for name, leaf in w.items()}, w.layout)
    plain, pulled = make_cohort(task), make_cohort(task)
    usual = sgd(plain, w, epochs=1)  # one step
    mine = sgd(pulled, w, epochs=1, penalty=proximal(0.5, center=own))
    for name, leaf in usual.items():
        for k in range(task.clients):
            torch.testing.assert_close(mine[name][k], leaf[k] + 0.1 * 0.5 * k, rtol=0, atol=1e-12)
    assert torch.equal(pulled.notes["loss/main"], plain.notes["loss/main"])


def test_a_penalty_of_ones_own(make_task, make_cohort):
    task = make_task(dtype=torch.float64, batch_size=100)
    w = task.network.initial
    decay = Penalty(lambda g, v, strength: g.moved(v.only(g), strength), 0.5)
    usual, mine = sgd(make_cohort(task), w, epochs=1), sgd(make_cohort(task), w, epochs=1, penalty=decay)
    for name, leaf in usual.items():
        torch.testing.assert_close(mine[name], leaf - 0.1 * 0.5 * w[name], rtol=0, atol=1e-12)
