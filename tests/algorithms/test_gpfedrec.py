"""GPFedRec: cosines and mixed rows against dense tables, its graphs, and its limit."""

import numpy as np
import pytest
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fedmf import FedMF
from atoll.algorithms.gpfedrec import GPFedRec, State, compare_tables, draw_to_neighbours, mix_rows, weigh_rows
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Arrival, Replies

CLIENTS, ITEMS, RANK = 5, 7, 3


def rows_and_tables(dtype=torch.float64):
    """Return a table, what clients changed of it, as entries and as whole tables, and how much each row counts."""
    draw = np.random.Generator(np.random.Philox(2))
    base = torch.from_numpy(draw.normal(size=(ITEMS, RANK + 1))).to(dtype)
    change = torch.from_numpy(draw.normal(size=(CLIENTS, ITEMS, RANK + 1))).to(dtype)
    count = torch.from_numpy(draw.integers(3, size=(CLIENTS, ITEMS)).astype(float)).to(dtype)
    count[:, 6] = 0  # a row that nobody touched
    change = change * (count > 0)[..., None]
    row, owner = torch.nonzero(count.T, as_tuple=True)
    table = Params({"body.vector": base[:, :-1], "body.bias": base[:, -1]})
    entries = change[owner, row]
    sent = Params({
        "body.vector": entries[:, :-1], "body.bias": entries[:, -1], "row": row, "owner": owner,
        "count": count[owner, row],
    })  # fmt: skip
    return table, sent, base + change, count


def test_cosines_are_those_of_whole_tables():
    table, sent, whole, _ = rows_and_tables()
    flat = whole.flatten(1)
    flat = flat / flat.norm(dim=1, keepdim=True)
    torch.testing.assert_close(compare_tables(table, CLIENTS, sent), flat @ flat.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_means_over_those_who_touched_them(dtype):
    table, sent, whole, count = rows_and_tables(dtype)
    links = torch.from_numpy(np.random.Generator(np.random.Philox(3)).random((CLIENTS, CLIENTS)) < 0.6)
    links[1] = False
    found = mix_rows(table, links, weigh_rows(table, sent))
    for client in range(CLIENTS):
        for row in range(ITEMS):
            share = links[client].to(dtype) * count[:, row]
            base = torch.cat([table["body.vector"][row], table["body.bias"][row, None]])
            mean = (share[:, None] * whole[:, row]).sum(0) / share.sum() if share.sum() > 0 else base
            mine = torch.cat([found["body.vector"][client, row], found["body.bias"][client, row, None]])
            torch.testing.assert_close(mine, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("equal", [True, False])
def test_the_table_is_the_mean_of_all_means_by_counts(equal):
    """h_j = sum_k A_kj; with equal counts the table is mean_k R_k, as in the paper."""
    table, _, whole, count = rows_and_tables()
    count = torch.ones_like(count) if equal else count
    values = {"body.vector": whole[..., :-1], "body.bias": whole[..., -1]}
    change = Stack({leaf: value - table[leaf] for leaf, value in values.items()})
    message = change | Stack.of(row=torch.arange(ITEMS).expand(CLIENTS, -1), count=count)
    replies = Replies([Arrival(np.arange(CLIENTS), {"rows": message}, torch.ones(CLIENTS))], keep=True)
    method = GPFedRec()
    _, sent = replies.list_rows("rows", table)
    links = method.link(table, CLIENTS, sent)
    after = method.aggregate(State(table, torch.arange(0), links[:0, :0], sent=None), replies).table
    A = links.double() / links.sum(1, keepdim=True)
    share, base = (
        (A.sum(0)[:, None] * count)[..., None],
        torch.cat([table["body.vector"], table["body.bias"][:, None]], 1),
    )
    expected = torch.where(share.sum(0) > 0, (share * whole).sum(0) / share.sum(0), base)
    torch.testing.assert_close(torch.cat([after["body.vector"], after["body.bias"][:, None]], 1), expected)
    if equal:
        torch.testing.assert_close(expected, torch.einsum("kj,jid->kid", A, whole).mean(0))


def test_graphs_link_those_alike_or_unlike():
    table, sent, _, _ = rows_and_tables()
    cosines = compare_tables(table, CLIENTS, sent)
    alike = GPFedRec().link(table, CLIENTS, sent)
    assert torch.equal(alike, cosines > cosines.mean())
    assert alike.diagonal().all()
    unlike = GPFedRec(graph="official").link(table, CLIENTS, sent)
    assert not unlike.diagonal().any()
    assert GPFedRec(graph="all").link(table, CLIENTS, sent).all()
    alone = GPFedRec(threshold=100.0).link(table, CLIENTS, sent)
    assert torch.equal(alone, torch.eye(CLIENTS, dtype=torch.bool))


def test_linked_to_all_without_pull_it_is_fedmf():
    task = make_ratings()
    plain, linked = recommend(task, FedMF(), 3), recommend(task, GPFedRec(reg=0.0, graph="all", rows="shared"), 3)
    for leaf, value in plain.server.items():
        torch.testing.assert_close(linked.server.table[leaf], value)
    drawn = recommend(task, GPFedRec(rows="shared"), 3)
    assert not torch.allclose(drawn.server.table["body.vector"], plain.server["body.vector"])


def test_who_did_not_reply_is_drawn_to_the_table():
    task = make_ratings()
    report = recommend(task, GPFedRec(), 2, cohort=3)
    replied = report.server.clients.numpy()
    absent = np.setdiff1d(np.arange(task.clients), replied)
    R = report.algorithm.unicast(report.server, absent)
    for leaf, value in report.server.table.items():
        torch.testing.assert_close(R[leaf], value.expand_as(R[leaf]))
    assert np.isfinite(report.scores()).all()


def test_the_pull_by_hand():
    """Of two dimensions and a bias, the mean squared distance at a place that counts twice and one that counts once."""
    whole = Params({"body.vector": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "body.bias": torch.tensor([3.0, 0.0])})
    R = Params({"body.vector": torch.tensor([[0.0, 0.0], [0.0, 1.0]]), "body.bias": torch.tensor([1.0, 0.0])})
    found = draw_to_neighbours(0.5, whole, R, torch.tensor([[0, 1]]), torch.tensor([[2.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor(0.5 * (2 * (1 + 4 + 4) + 1) / 3))


def test_a_stronger_pull_keeps_rows_nearer_to_the_neighbours():
    task, apart = make_ratings(), {}
    for reg in (1e-9, 3.0):

        class Watched(GPFedRec):
            def local(self, w, cohort):
                update = super().local(w, cohort)
                rows, R = update.send["rows"], cohort.received
                real = rows["row"].clamp(max=task.classes - 1).long()
                each = torch.arange(len(cohort))[:, None]
                mine = w["body.bias"][real] + rows["body.bias"]
                far = (mine - R["body.bias"][each, real]).abs() * (rows["count"] > 0)
                apart.setdefault(self.reg, []).append(far.sum())
                return update

        recommend(task, Watched(reg=reg, rate=0.3, epochs=5), 3)
    assert sum(apart[3.0]) < sum(apart[1e-9])
