"""FEDORA for recommenders: sketches keep cosines, the gate asks held-back items, new users with items and without."""

from dataclasses import replace

import numpy as np
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.fedmf import FedMF
from atoll.algorithms.fedora_items import FedoraItems, draw_signs, draw_to
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.replies import Arrival, Replies
from atoll.toolbox.client.items import Touched, find_last


def test_a_sketch_keeps_cosines():
    draw = np.random.Generator(np.random.Philox(4))
    x = torch.from_numpy((draw.random((6, 300)) < 0.1).astype(float))
    z = x @ draw_signs(0, 300, 4096) / (x.sum(1, keepdim=True) * 4096).sqrt()
    exact = x / x.norm(dim=1, keepdim=True)
    assert (z @ z.T - exact @ exact.T).abs().max() < 0.1
    assert (draw_signs(0, 5, 8).abs() == 1).all()


def test_sketches_are_as_exact_as_what_trains():
    seen = []

    class Watched(FedoraItems):
        def describe(self, cohort):
            z = super().describe(cohort)
            seen.extend(zip(cohort.samples.tolist(), z, strict=True))
            return z

    recommend(make_ratings(), Watched(sketch=8), rounds=1)
    for items, z in seen:
        sums = z * (items * 8) ** 0.5  # of signs
        assert (sums - sums.round()).abs().max() < 1e-14
    assert len(seen) == 8


def test_the_last_items_are_held_back():
    in_time = torch.tensor([[4, 9, 1, 7, 12, 12], [3, 12, 12, 12, 12, 12], [5, 2, 12, 12, 12, 12]])
    known = in_time.sort(1).values
    assert find_last(in_time, known, 0.5, 12).tolist() == [[1, 7, 12], [12, 12, 12], [2, 12, 12]]
    assert (find_last(in_time, known, 0.0, 12) == 12).all()
    assert find_last(in_time, known, 0.1, 12).tolist() == [[7], [12], [2]]


def test_held_back_items_do_not_train():
    """A held-back item that nobody draws keeps its row; FedMF moves it."""
    seen = []

    class Watched(FedoraItems):
        def local(self, w, cohort):
            touched, update = Touched(cohort, self.negatives, self.epochs, hold=self.hold), super().local(w, cohort)
            seen.append((touched, update.send["rows"]))
            return update

    recommend(make_ratings(), Watched(), 1)
    for touched, rows in seen:
        for client, held in enumerate(touched.held[:, 0].tolist()):
            if held < touched.items:
                place = touched.ids[client].tolist().index(held)
                assert rows["count"][client, place] == 0
                assert (touched.trains[client] == (touched.known[client] != held)).all()


def test_the_gate_opens_only_where_it_helps():
    """A vector that ranks the held-back item first passes; the own one, or a worse one, does not."""
    gates = {}

    class Watched(FedoraItems):
        def local(self, w, cohort):
            touched = Touched(cohort, self.negatives, self.epochs, hold=self.hold)
            held = w["body.vector"][touched.held[:, 0].clamp(max=touched.items - 1)]
            zero = self.recall_vector(cohort) * 0.0
            good, bad = (Stack({"head.vector": sign * 20 * held}, zero.layout) for sign in (1, -1))
            gates["good"] = self.strength(zero, good, w, cohort, touched)
            gates["bad"] = self.strength(zero, bad, w, cohort, touched)
            gates["same"] = self.strength(good, good, w, cohort, touched)
            return super().local(w, cohort)

    recommend(make_ratings(), Watched(lam_max=100.0), 1)
    assert (gates["good"] > 1).all()
    assert (gates["bad"] == 0).all()
    assert (gates["same"] == 0).all()


def test_without_held_back_items_it_is_fedmf():
    task = make_ratings()
    plain, shut = recommend(task, FedMF(), 3), recommend(task, FedoraItems(hold=0.0, lam_max=0.0), 3)
    for leaf, value in plain.server.items():
        assert torch.equal(shut.server.table[leaf], value)


def test_rows_of_propagation_are_distributions_and_noise_changes_links():
    task = make_ratings()
    plain, noisy = (recommend(task, FedoraItems(topk=3, noise=noise), 2) for noise in (0.0, 0.5))
    for report in (plain, noisy):
        torch.testing.assert_close(report.server.P.sum(1), torch.ones(task.clients, dtype=report.server.P.dtype))
    assert not torch.equal(plain.server.sketch, noisy.server.sketch)


def test_users_of_other_items_do_not_reach_each_other():
    """Two groups without an item in common: after `absorb`, a user of whose group nobody replied has itself."""
    task, draw = make_ratings(users=12), generator(0, "tastes")
    report = recommend(task, FedoraItems(topk=1), 1)
    tastes = np.kron(np.eye(2), np.ones((6, 8))) + 0.1 * np.kron(np.eye(2), draw.random((6, 8)))
    sketch = torch.zeros_like(report.server.sketch)
    sketch[:, :16] = torch.from_numpy(tastes).to(sketch)
    message = Arrival(np.arange(12), {"sketch": Stack.of(z=sketch)}, torch.ones(12))
    server = report.algorithm.absorb(report.server, Replies([message], keep=True))
    found = report.algorithm.mixing(replace(server, seen=torch.arange(12) < 6))
    assert torch.equal(found[6:], torch.eye(12)[6:].to(found))
    assert not found[:6, 6:].any()


def test_new_users_with_items_and_without():
    """With items a vector reaches them, which is then fitted while the table stays; without, biases decide."""
    task = make_ratings(users=12).hold_out(0.25, 0)
    found = recommend(task, FedoraItems(topk=3), 5).newcomers
    assert found is not None
    assert found.unlabelled["way"] == "welcome"
    losses = [found.labelled[epochs].loss for epochs in ("0", "1", "5", "10")]
    assert len({round(one, 6) for one in losses}) == 4  # each epoch of fitting moves the vector
    assert found.unlabelled["loss"] not in losses


def test_the_pull_by_hand():
    """Summed over three pairs and divided by them, its gradient is lam (p - G)."""
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    beside = Params.of(**{"head.vector": torch.tensor([0.5, 0.0]), "lam": torch.tensor(0.4)})
    found = draw_to(("head.vector",), Params({"head.vector": p}), beside, torch.zeros(0), torch.tensor([1.0, 2.0]))
    (slope,) = torch.autograd.grad(found / 3, p)
    torch.testing.assert_close(slope, 0.4 * (p.detach() - torch.tensor([0.5, 0.0])))
