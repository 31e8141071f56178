"""Closed forms and limits of recommenders: rank one, other numbers of items, gathered rows, a memoriser, what leaks."""

import numpy as np
import pytest
import torch

from atoll import Task, federate, models
from atoll.algorithms import fedora_items
from atoll.algorithms.fcf import FCF
from atoll.algorithms.fedmf import FedMF
from atoll.data.datasets import Dataset
from atoll.data.partition import Natural
from atoll.data.ratings import list_interactions
from atoll.kernel.errors import AtollError
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator
from atoll.runtime.engines import LocalEngine
from atoll.toolbox.client import items
from atoll.toolbox.client.items import Touched, draw_negatives

METHODS = ["fedmf", "fcf", "fedncf", "pfedrec", "gpfedrec", "fedrap", "fedora-items:sketch=64,topk=3", "local-items"]
ITEMS, USERS = 14, 8


def make(numbers=None, *, model="item-factors", rank=3, users=USERS, count=ITEMS, most=5, leak=False) -> Task:
    """Make users with 5 and more items, whose numbers may be others: their first rows then move with them."""
    draw = np.random.Generator(np.random.Philox(5))
    rows = [(u, i, t) for u in range(users) for t, i in enumerate(draw.permutation(count)[: 5 + u % most])]
    user, item, time = np.array(rows).T
    item = item if numbers is None else numbers[item]
    fields = list_interactions("tiny", "a test", user, item, time, fewest=(5, 1), leak=leak)
    with default_generator(0):
        network = models.build(model, (2,), fields["classes"], rank=rank).double()
    if numbers is not None:
        first = network.body.vector.detach().clone()
        network.body.vector.data[torch.from_numpy(numbers)] = first
    return Task.build(Dataset(**fields), Natural(), model=network)


def run(task, method, rounds, **more):
    engine = LocalEngine(strategy="whole eager", dtype=torch.float64)
    return federate(task, method, rounds=rounds, progress=False, engine=engine, **more)


def model_for(name: str) -> str:
    return "neural-items" if name == "fedncf" else "item-factors"


def table_of(server) -> Params | None:
    return getattr(server, "table", server)


@pytest.mark.closed_form("fcf")
def test_a_matrix_of_rank_one_is_recovered_in_one_round():
    """X = a b' with a = 1: p_k = (q.b) / |q|^2, and a step of 1 / sum p^2 makes q a multiple of b, from any q."""
    users, known = 6, 5
    rows = [(u, i, i if i < known else 100 + i) for u in range(users) for i in range(known + 2)]
    fields = list_interactions("rank one", "a test", *np.array(rows).T, fewest=(5, 1))
    with default_generator(0):
        network = models.build("item-factors", (2,), fields["classes"], rank=1).double()
    task = Task.build(Dataset(**fields), Natural(), model=network)
    q, b = task.network.initial["body.vector"][:, 0], torch.tensor([1.0] * known + [0.0] * 2, dtype=torch.float64)
    p = (q @ b) / q.square().sum()
    assert abs(p) > 1e-3
    method = FCF(alpha=0.0, lam=0.0, server="sgd", bias=False, rate=1 / float(users * p**2))
    report = run(task, method, 1)
    after = report.server.table["body.vector"][:, 0]
    recovered = torch.outer(torch.full((users,), float((after @ b) / after.square().sum()), dtype=torch.float64), after)
    torch.testing.assert_close(recovered, b.expand(users, -1), rtol=0, atol=1e-12)


@pytest.mark.closed_form("fcf", "fedmf", "fedncf", "fedora-items", "fedrap", "gpfedrec", "local-items", "pfedrec")
@pytest.mark.parametrize("name", METHODS)
def test_other_numbers_of_items_change_nothing(name, monkeypatch):
    """The same items under other numbers, the same first rows and the same draws: rows move with their numbers."""
    kind = model_for(name)
    numbers = np.random.Generator(np.random.Philox(6)).permutation(ITEMS)
    plain, other = make(model=kind), make(numbers, model=kind)
    assert plain.classes == other.classes == ITEMS
    place = torch.from_numpy(numbers)
    before = run(plain, name, 3, metric="mrr")

    there, back = torch.cat([place, torch.tensor([ITEMS])]), torch.cat([place.argsort(), torch.tensor([ITEMS])])
    signs = fedora_items.draw_signs

    def draw(cohort, known, *words, **more):
        """Draw the same items for the same training items, which stand at other places."""
        plain, order = torch.sort(back[known], dim=1, stable=True)
        drawn = there[draw_negatives(cohort, plain, *words, **more)]
        if more:
            return drawn
        each = torch.arange(len(drawn))[:, None]
        return torch.empty_like(drawn).index_put((each, order[:, : drawn.shape[1]]), drawn)

    monkeypatch.setattr(items, "draw_negatives", draw)
    monkeypatch.setattr(fedora_items, "draw_negatives", draw)
    monkeypatch.setattr(fedora_items, "draw_signs", lambda *words: signs(*words)[back[:-1]])
    after = run(other, name, 3, metric="mrr")
    np.testing.assert_allclose(after.scores(), before.scores(), atol=1e-9)
    if table_of(before.server) is not None:
        for leaf, value in table_of(before.server).items():
            same = table_of(after.server)[leaf]
            torch.testing.assert_close(same[place] if leaf.startswith("body.") else same, value, rtol=0, atol=1e-9)


@pytest.mark.purpose("fcf", "fedmf", "fedncf", "fedora-items", "fedrap", "gpfedrec", "local-items", "pfedrec")
@pytest.mark.parametrize("name", METHODS)
def test_no_vector_of_a_user_is_sent(name):
    """Only `fedora-items` sends vectors, and says so."""
    seen = []
    report = run(make(model=model_for(name)), name, 2, on_reply=lambda _, arrival: seen.append(arrival))
    sent = {message.field for message in report.ledger.messages() if message.direction == "up"}
    leaves = {leaf for arrival in seen for field in arrival.fields.values() for leaf in field}
    own = set(report.task.network.initial.part("head"))
    if name.startswith("fedora-items"):
        assert own <= leaves
        assert "vector" in sent
    else:
        assert not own & leaves
        assert sent <= {"rows", "gradient", "delta", "weight"}


@pytest.mark.closed_form("fedmf", "fedncf", "fedrap", "gpfedrec", "local-items", "pfedrec")
@pytest.mark.parametrize("name", ["fedmf", "fedncf", "pfedrec", "gpfedrec", "fedrap", "local-items"])
def test_gathered_rows_are_the_whole_table_bit_for_bit(name, monkeypatch):
    """Clients that take all rows of the table, and not those they touch, end with the same bits."""
    task = make(model=model_for(name))
    gathered = run(task, name, 3, metric="mrr")
    begin = Touched.__init__

    def take_all(self, cohort, negatives, epochs, *, hold=0.0):
        begin(self, cohort, negatives, epochs, hold=hold)
        drawn = [self.ids[torch.arange(len(cohort))[:, None, None], one] for one in self.drawn]
        self.ids = torch.arange(self.items + 1).expand(len(cohort), -1).contiguous()
        self.place, self.drawn = self.known, drawn

    monkeypatch.setattr(Touched, "__init__", take_all)
    whole = run(task, name, 3, metric="mrr")
    np.testing.assert_array_equal(whole.scores(), gathered.scores())
    if table_of(whole.server) is not None:
        for leaf, value in table_of(gathered.server).items():
            assert torch.equal(table_of(whole.server)[leaf], value)


@pytest.mark.purpose("local-items")
def test_a_memoriser_needs_the_leak():
    """One number per user and item: 100 % where held-out items are spared, chance where they are not."""
    size = {"users": 12, "count": 80, "most": 3}
    spared, honest = (run(make(leak=leak, **size), "local-items", 120).summary()["macro"] for leak in (True, False))
    assert spared == 1.0
    assert honest < 0.4  # chance is 10 of about 75


@pytest.mark.closed_form("fcf")
def test_a_message_gives_the_vector_away_and_a_sum_does_not():
    """Of FCF as of FedMF, the change of q by that of b is p. Of a sum over clients it is nobody's vector."""
    seen = []
    task = make()
    run(task, FCF(), 1, on_reply=lambda _, arrival: seen.append(arrival))
    sent = {
        leaf: torch.cat([arrival.fields["gradient"][leaf] for arrival in seen]) for leaf in seen[0].fields["gradient"]
    }
    told = sent["body.vector"] / sent["body.bias"][..., None]
    assert (told - told[:, :1]).abs().max() < 1e-9  # the same from any item: the vector of that client
    total = sent["body.vector"].sum(0) / sent["body.bias"].sum(0)[:, None]
    assert (total[:, None] - told[:, 0]).abs().sum(-1).min() > 1e-6


@pytest.mark.purpose("fcf", "fedmf")
def test_secure_sums_are_refused_where_rows_say_whose_they_are():
    task = make()
    method = FCF(server="sgd", rate=0.001)
    plain, masked = run(task, method, 2), run(task, method, 2, secure="masks:clip=200")
    torch.testing.assert_close(masked.server.table["body.vector"], plain.server.table["body.vector"], rtol=0, atol=1e-5)
    with pytest.raises(AtollError, match="sum"):
        run(task, FedMF(), 2, secure="masks")


@pytest.mark.purpose("fedmf")
def test_rows_that_few_touch_stay():
    """With `crowd`, a row moves only where that many clients touched it, so no single client shows in it."""
    task, touched = make(), []

    def note(_, arrival):
        rows = arrival.fields["rows"]
        touched.append([set(r[c > 0].tolist()) for r, c in zip(rows["row"], rows["count"], strict=True)])

    report = run(task, FedMF(crowd=6), 1, on_reply=note)
    counts = np.zeros(ITEMS, dtype=int)
    for one in (client for some in touched for client in some):
        counts[list(one)] += 1
    moved = (report.server["body.bias"] != 0).numpy()
    assert (counts < 6).any()
    assert not moved[counts < 6].any()
    assert moved[counts >= 6].mean() > 0.8  # a few stand still because what pulls them balances
