"""Rules on the replies of protect.md 5.2, their breakdown, and what they are refused with."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Recipe, federate
from atoll.algorithms import FML, IFCA, FedAMP, FedAvg, Scaffold
from atoll.kernel.algorithm import Arrival, Replies
from atoll.kernel.errors import CohortError, HyperparameterError, PayloadError, TaskError, UnknownName
from atoll.kernel.network import Network
from atoll.kernel.params import Stack, spread
from atoll.kernel.randomness import generator
from atoll.protect.rules import (
    RULES,
    ByCoordinate,
    ByReply,
    NearestMixing,
    Robust,
    Trimmed,
    krum_scores,
    parse_rule,
    trust_shares,
)
from atoll.protect.vectors import weigh

X = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 1], [50, -40]], dtype=torch.float64)


def arrivals(x, cut=None):
    """The rows of x as replies, in one piece or in two."""
    pieces = [x] if cut is None else [x[:cut], x[cut:]]
    starts = [0] if cut is None else [0, cut]
    return [
        Arrival(np.arange(start, start + len(one)), {"delta": Stack.of(w=one)}, torch.ones(len(one)))
        for start, one in zip(starts, pieces, strict=True)
    ]


def combine(words, x=X, cut=None):
    return parse_rule(words).combine(arrivals(x, cut), None)["delta"]["w"].tolist()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("median", [1, 0]),
        ("trimmed:1", [4 / 3, 1 / 3]),
        ("trimmed:0", [10.8, -7.4]),
        ("meamed:1", [1, 0.75]),
        ("krum:1", [0, 0]),
        ("multi-krum:1", [1, 0.75]),
        ("geometric", [1, 0]),
        ("centered-clip:2", [1.3614764985, 0.4162787614]),
        ("norm-bound:2", [0.8918208430, 0.2766130874]),
        ("norm-bound", [0.8918208430, 0.2766130874]),  # the median norm is 2
        ("nnm:1+trimmed:1", [1, 0.75]),
        ("nnm:1+median", [1, 0.75]),
        ("nnm:1+krum:1", [1, 0.75]),
        ("nnm:1+geometric", [1, 0.75]),
        ("bucket:2+median", [1.5, 0]),
    ],
)
@pytest.mark.parametrize("cut", [None, 2])
def test_rules_give_what_they_give_by_hand(words, expected, cut):
    assert combine(words, cut=cut) == pytest.approx(expected, abs=1e-9 if "geometric" not in words else 5e-6)


@pytest.mark.parametrize(
    ("values", "hostile", "expected"),
    [
        ([-104, -104, -0.84, -0.05, 0.41], 1, (-104 - 0.84 - 0.05 + 0.41) / 4),  # one of two equal values is left out
        ([-1, 0, 1], 1, 0),  # -1 and 1 are equally far: each counts half
        ([-1, -1, 0, 1], 1, -2 / 3),
        ([-2, -2, 0, 2, 5], 2, (0 + 2 / 3 * (-2 - 2 + 2)) / 3),
        ([3, 3, 3, 3], 1, 3),
        ([7, 1, 1], 1, 1),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_equally_far_from_the_median_count_alike(values, hostile, expected, sign):
    # catches: the lower of two equally far values being taken, which draws every coordinate down
    draw = np.random.Generator(np.random.Philox(1))
    x = sign * torch.tensor(draw.permutation(values), dtype=torch.float64)[:, None]
    assert combine(f"meamed:{hostile}", x) == pytest.approx([sign * expected])


@pytest.mark.parametrize("hostile", [1, 2, 3])
def test_without_ties_it_is_the_mean_of_the_nearest(hostile):
    x = torch.from_numpy(np.random.Generator(np.random.Philox(3)).normal(size=(8, 50)))
    median = x.sort(0).values[3:5].mean(0)
    nearest = (x - median).abs().argsort(0)[: 8 - hostile]
    assert combine(f"meamed:{hostile}", x) == pytest.approx(x.gather(0, nearest).mean(0).tolist(), abs=1e-12)


def test_krum_counts_and_mixed_rows_by_hand():
    products = X @ X.T
    assert krum_scores(products, 1).tolist() == pytest.approx([5, 6, 9, 15, 7891])
    mixed = NearestMixing(1).matrix(products, None) @ X
    torch.testing.assert_close(mixed, torch.tensor([[1, 0.75]] * 4 + [[13.5, -9.75]], dtype=torch.float64))


@pytest.mark.parametrize("words", ["median", "trimmed:3", "meamed:3", "geometric"])
def test_hostile_replies_leave_coordinates_in_the_honest_box(words):
    """F of K rows of size 1e6: coordinate rules stay in the box, the geometric median within its radius."""
    draw = generator(2, "rows")
    honest = torch.from_numpy(draw.normal(size=(8, 6)))
    made = torch.tensor(combine(words, torch.cat([honest, torch.full((3, 6), 1e6, dtype=torch.float64)])))
    if words == "geometric":
        center = honest.mean(0)
        assert (made - center).norm() <= 2 * 8 / (11 - 2 * 3) * (honest - center).norm(dim=1).max()
    else:
        assert bool(((honest.amin(0) <= made) & (made <= honest.amax(0))).all())


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    assert combine("median", X[:4]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[0, 0], [1, 0], [0, 1]], [(3 - 3**0.5) / 6] * 2), ([[0, 0], [2, 0], [3, 2], [0, 1]], [6 / 7, 4 / 7])],
)
def test_the_geometric_median_is_where_distances_add_up_to_least(rows, expected):
    assert combine("geometric", torch.tensor(rows, dtype=torch.float64)) == pytest.approx(expected, abs=1e-6)


def test_enlarged_replies_move_statistics_no_further_than_clients_did():
    network = Network(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    moved = network.initial.only(["1.weight", "1.running_var"]).map(torch.neg)  # both from 1 to 0
    replies = {"delta": spread(moved, 2)}
    made = weigh(replies, torch.tensor([3.0, 1.0]))["delta"]
    assert made["1.running_var"].tolist() == [-1, -1]
    assert made["1.weight"].tolist() == [-4, -4]
    halved = weigh(replies, torch.tensor([0.25, 0.25]))["delta"]
    assert halved["1.running_var"].tolist() == [-0.5, -0.5]


def test_trust_goes_by_the_cosine_with_the_servers_own_change():
    x = torch.tensor([[2, 0], [0, 3], [3, 4], [-1, 0]], dtype=torch.float64)
    shares = trust_shares(x[:, 0], x.norm(dim=1), torch.ones((), dtype=torch.float64))
    assert (shares @ x).tolist() == pytest.approx([0.85, 0.3])
    assert trust_shares(-x[:1, 0], x[:1].norm(dim=1), torch.ones(())).tolist() == [0.0]


@pytest.mark.parametrize("words", ["median", "trimmed:3", "meamed:3", "krum:3", "multi-krum:3", "geometric",
                                   "nnm:3+trimmed:3", "nnm:3+krum:3", "norm-bound", "centered-clip"])  # fmt: skip
def test_hostile_replies_of_any_size_cannot_carry_a_rule_away(words):
    draw = generator(0, "rows")
    honest = torch.from_numpy(draw.normal(size=(9, 20)))
    hostile = torch.from_numpy(draw.normal(size=(3, 20))) * 1e8
    made = torch.tensor(combine(words, torch.cat([honest, hostile])))
    assert made.norm() <= 3 * honest.norm(dim=1).max()


@pytest.mark.parametrize("words", ["median", "trimmed:1", "krum:1", "multi-krum:1", "geometric", "nnm:1+meamed:1"])
def test_the_order_of_clients_and_the_origin_do_not_matter(words):
    draw = generator(1, "rows")
    x = torch.from_numpy(draw.normal(size=(8, 5)))
    made, order = combine(words, x), torch.from_numpy(draw.permutation(8))
    assert combine(words, x[order]) == pytest.approx(made, abs=1e-9)
    assert combine(words, x + 7) == pytest.approx([one + 7 for one in made], abs=1e-6)


def test_a_rule_sees_all_fields_of_a_reply_as_one_vector():
    """Krum chooses one client, and takes all fields of it; each field alone would choose another."""
    a = torch.tensor([[0.0], [0.1], [5.0], [9.0]], dtype=torch.float64)
    b = torch.tensor([[9.0], [0.1], [0.0], [0.0]], dtype=torch.float64)
    one = Arrival(np.arange(4), {"a": Stack.of(w=a), "b": Stack.of(w=b)}, torch.ones(4))
    made = Robust(parse_rule("krum:0").rule).combine([one], None)
    assert (made["a"]["w"].item(), made["b"]["w"].item()) in [(x.item(), y.item()) for x, y in zip(a, b, strict=True)]


def test_under_a_rule_every_client_counts_the_same_and_sums_are_of_as_many_as_replied():
    fields = {"delta": Stack.of(w=X[:4], n=torch.tensor([3, 1, 2, 9]))}
    replies = Replies([Arrival(np.arange(4), fields, torch.tensor([100.0, 1, 1, 1]))], keep=False,
                      rule=parse_rule("trimmed:0"))  # fmt: skip
    assert replies.mean("delta")["w"].tolist() == [1.0, 0.75]
    assert replies.sum("delta")["w"].tolist() == [4.0, 3.0]
    assert replies.total == 4
    assert replies.mean("delta")["n"].item() == 2  # whole numbers: the lower median
    with pytest.raises(PayloadError, match="a mean with weights of its own"):
        replies.mean("delta", weight="delta")


def test_each_segment_has_a_rule_of_its_own():
    fields = {"delta": Stack.of(w=X), "by": Stack.of(s=torch.tensor([0, 0, 0, 1, 1]))}
    replies = Replies([Arrival(np.arange(5), fields, torch.ones(5))], keep=False, rule=parse_rule("median"))
    found = replies.segment_mean("delta", "by", Stack.of(w=torch.zeros(3, 2, dtype=torch.float64)))
    assert found["w"].tolist() == [[0, 0], [26.5, -19.5], [0, 0]]
    assert replies.members[1].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), IFCA(clusters=1)])
def test_without_hostile_clients_a_trimmed_mean_of_all_is_the_mean(make_task, method):
    task = make_task(sizes=(6, 6, 6, 6), dtype=torch.float64)
    plain, ruled = (
        federate(task, method, rounds=3, evaluation="none", aggregate=words).server for words in ("mean", "trimmed:0")
    )
    one, two = (getattr(state, "w", getattr(state, "models", state)) for state in (plain, ruled))
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-12), name


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ("medain", UnknownName, "median"),
        ("trimmed:x", HyperparameterError, "how many replies of a round may be hostile"),
        ("trimmed:3", HyperparameterError, "bears at most 1 hostile replies of 4"),
        ("krum:1", HyperparameterError, "bears at most 0"),
        ("median:2", HyperparameterError, "takes no value"),
        ("nnm+bucket+median", HyperparameterError, "at most one mixing"),
        ("nnm+fltrust", HyperparameterError, "nothing is mixed before it"),
        ("norm-bound:-1", HyperparameterError, "a norm above 0"),
        ("fltrust", TaskError, "public"),
    ],
)
def test_rules_that_cannot_work_are_refused_before_the_first_round(make_task, words, error, text):
    with pytest.raises(error, match=text):
        federate(make_task(), FedAvg(), rounds=1, evaluation="none", aggregate=words)


def test_a_method_that_reads_single_replies_is_refused(make_task):
    with pytest.raises(CohortError, match="reads single replies"):
        federate(make_task(), FedAMP(), rounds=1, evaluation="none", aggregate="median")


def test_a_method_that_sends_models_of_another_network_has_none_that_the_server_could_train() -> None:
    task = Recipe(clients=3, samples=90, public=0.2).build()
    with pytest.raises(CohortError, match=r"For `aggregate=fltrust` .* but FML sends models of another one"):
        federate(task, FML(meme="linear"), rounds=1, evaluation="none", aggregate="fltrust")
    federate(task, FML(), rounds=1, evaluation="none", aggregate="fltrust")


def test_auto_counts_with_what_a_round_may_hold():
    resolved = Robust(Trimmed()).resolve(50, 1000, 100)
    assert resolved.hostile == 12
    assert Robust(Trimmed()).resolve(20, 20, None).hostile == 4
    with pytest.raises(HyperparameterError, match="must bear 6"):
        Robust(Trimmed()).resolve(10, 100, 20)


@pytest.mark.parametrize(
    ("words", "attackers", "said"),
    [
        ("trimmed:1", 4, "trimmed is set to bear 1 hostile replies of 20 in a round, and breaks down beyond 9"),
        ("krum:1", 4, "krum is set to bear 1 hostile replies of 20 in a round, and breaks down beyond 8"),
        ("median", 10, "median is set to bear 9 hostile replies of 20 in a round, and breaks down beyond 9"),
        ("nnm:2+median", 10, "breaks down beyond 9; 10 of 20 clients attack, so a round may hold 10"),
        ("bucket:5+median", 4, "bucket+median is set to bear 1 hostile replies of 20"),  # 4 groups of 5
        ("centered-clip", 10, "centered-clip is set to bear 9"),
        ("trimmed:4", 4, ""),
        ("median", 9, ""),
        ("bucket:2+median", 4, ""),
        ("fltrust", 19, ""),  # trusts its own samples, not the majority
    ],
)
def test_more_attackers_than_a_rule_survives_are_said_with_its_breakdown_point(caplog, words, attackers, said):
    with caplog.at_level(logging.WARNING):
        parse_rule(words).resolve(20, 20, attackers).warn_of_attackers(20, 20, attackers)
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_the_warning_comes_once_and_before_the_first_round(make_task, caplog):
    seen = []
    with caplog.at_level(logging.WARNING, logger="atoll.protect"):
        federate(
            make_task(sizes=(6,) * 5), FedAvg(), rounds=2, evaluation="none", attack="sign-flip:0.6",
            aggregate="median", on_round=lambda _: seen.append(len(caplog.records)),
        )  # fmt: skip
    assert seen == [1, 1]


@pytest.mark.parametrize("name", ["trimmed", "meamed", "krum", "multi-krum", "nnm+median", "bucket:4+trimmed"])
def test_a_rule_that_cannot_bear_the_attack_under_way_is_refused(make_task, name):
    with pytest.raises(HyperparameterError, match=r"bears at most \d hostile replies of 10 in a round. It must bear 6"):
        federate(make_task(sizes=(6,) * 10), FedAvg(), rounds=1, evaluation="none", attack="alie:0.6", aggregate=name)


@pytest.mark.parametrize("base", [ByCoordinate, ByReply])
def test_a_rule_must_say_what_it_does(base):
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_a_round_with_few_replies_bears_fewer_hostile_ones(caplog):
    with caplog.at_level(logging.WARNING):
        assert combine("trimmed:2", X[:3]) == [0, 0]  # one from each end
    assert "only 3 replies" in caplog.text


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_explained(name):
    assert len((RULES[name].__doc__ or "").split("\n")[0]) > 20
