"""Margins: what each client can tell apart, by hand, and who has a say about what."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.params import Stack
from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.margins import BETWEEN, NEVER, Voting, margin_logits, margins
from atoll.toolbox.server.fusion import discernment
from atoll.toolbox.server.triangles import triangle

CLASSES, SIZE = 4, 5
EXACT = {"rtol": 0.0, "atol": 1e-9}


def drawn(client: int, labels: list[int]) -> tuple[Tensor, Tensor]:
    """Unit features of some samples, those of a class around one direction."""
    draw = generator(client, "margins")
    y = torch.tensor(labels)
    centres = torch.from_numpy(draw.normal(size=(CLASSES, SIZE)))
    return F.normalize(centres[y] + 0.7 * torch.from_numpy(draw.normal(size=(len(y), SIZE))), dim=1), y


def seen(*clients: tuple[Tensor, Tensor]) -> Stack:
    """What these clients send."""
    rows = []
    for z, y in clients:
        same = F.one_hot(y, CLASSES).double()
        rows.append((same.sum(0), same.T @ z, triangle(z.T @ z)))
    count, total, square = (torch.stack(part) for part in zip(*rows, strict=True))
    return Stack.of(count=count, sum=total, square=square)


def one(labels: list[int], client: int = 0) -> tuple[Tensor, Tensor]:
    return drawn(client, labels)


MIXED = [0] * 6 + [1] * 9 + [2] * 4


@pytest.mark.parametrize("shrinkage", [0.01, 0.25, 1.0])
def test_a_margin_is_1_on_average_within_a_class_and_0_elsewhere(shrinkage: float) -> None:
    z, y = one(MIXED)
    found = margin_logits(z[None], margins(seen((z, y)), shrinkage))
    for label in range(3):
        assert float(found[y == label, label].mean()) == pytest.approx(1, abs=1e-9)
        assert float(found[y != label, label].mean()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("shrinkage", [0.01, 0.25, 1.0])
def test_directions_by_hand(shrinkage: float) -> None:
    z, y = one(MIXED)
    told = margins(seen((z, y)), shrinkage)
    within = np.zeros((SIZE, SIZE))
    for label in range(3):
        apart = z[y == label].numpy() - z[y == label].numpy().mean(0)
        within += apart.T @ apart / len(y)
    s = (1 - shrinkage) * within + shrinkage * np.trace(within) / SIZE * np.eye(SIZE)
    for label in range(3):
        apart = z[y == label].numpy().mean(0) - z[y != label].numpy().mean(0)
        w = np.linalg.solve(s, apart)
        np.testing.assert_allclose(told["weight"][0, label], w / (w @ apart), rtol=0, atol=1e-8)


def test_clients_add_up_by_what_they_can_tell_apart() -> None:
    clients = [one(MIXED), one([0] * 3 + [3] * 20, 1), one([1] * 5 + [2] * 5, 2)]
    z = clients[0][0]
    votes = discernment(seen(*clients)["count"])
    asked = [margin_logits(z[None], margins(seen(client), 0.25)) for client in clients]
    expected = sum(vote * one for vote, one in zip(votes, asked, strict=True))
    found = margin_logits(z.expand(3, -1, -1), margins(seen(*clients), 0.25))
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("voting", ["classes", "uniform"])
def test_other_votes_are_shares_of_those_who_can_tell(voting: Voting) -> None:
    clients = [one(MIXED), one([0] * 3 + [3] * 20, 1), one([1] * 5 + [2] * 5, 2), one([0] * 9, 3)]
    count = seen(*clients)["count"][:3]
    votes = count if voting == "classes" else (count > 0).double()
    z = clients[0][0]
    asked = [margin_logits(z[None], margins(seen(client), 0.25)) for client in clients[:3]]
    expected = sum(vote * one for vote, one in zip(votes / votes.sum(0), asked, strict=True))
    found = margin_logits(z.expand(4, -1, -1), margins(seen(*clients), 0.25, voting=voting))
    torch.testing.assert_close(found, expected, **EXACT)


def test_without_the_common_scale_discriminants_are_added_as_they_are() -> None:
    z, y = one(MIXED)
    scaled, bare = (margins(seen((z, y)), 0.25, common=common) for common in (True, False))
    for label in range(3):
        apart = z[y == label].mean(0) - z[y != label].mean(0)
        length = float(bare["weight"][0, label] @ apart)
        torch.testing.assert_close(scaled["weight"][0, label] * length, bare["weight"][0, label], **EXACT)
        assert float((scaled["bias"] * length)[label]) == pytest.approx(float(bare["bias"][label]), abs=1e-9)


def test_features_need_no_common_coordinates() -> None:
    """catches: encoders that were trained apart, whose features are added or averaged as if they meant the same."""
    clients = [one(MIXED, k) for k in range(3)]
    asked = torch.stack([one(MIXED, 7)[0]] * 3)
    turned = [torch.linalg.qr(torch.from_numpy(generator(k, "turn").normal(size=(SIZE, SIZE))))[0] for k in range(3)]
    others = [(z @ q, y) for (z, y), q in zip(clients, turned, strict=True)]
    before = margin_logits(asked, margins(seen(*clients), 0.25))
    after = margin_logits(
        torch.stack([z @ q for z, q in zip(asked, turned, strict=True)]), margins(seen(*others), 0.25)
    )
    torch.testing.assert_close(after, before, **EXACT)


def test_who_has_one_class_has_no_say() -> None:
    several, single = one(MIXED), one([0] * 50, 1)
    told = margins(seen(several, single), 0.25)
    assert not told["weight"][1].any()
    torch.testing.assert_close(told["weight"][0], margins(seen(several), 0.25)["weight"][0], **EXACT)


def test_what_nobody_can_tell_apart_stands_between_and_what_nobody_has_is_never_said() -> None:
    several, single = one(MIXED), one([3] * 8, 1)
    found = margin_logits(torch.stack([several[0]] * 2), margins(seen(several, single), 0.25))
    torch.testing.assert_close(found[:, 3], torch.full((len(several[1]),), BETWEEN, dtype=torch.float64), **EXACT)
    assert (margin_logits(several[0][None], margins(seen(several), 0.25))[:, 3] == NEVER).all()


def test_features_that_are_all_the_same_say_nothing() -> None:
    y = torch.tensor([0, 0, 1])
    z = F.normalize(torch.ones(3, SIZE, dtype=torch.float64), dim=1)
    told = margins(seen((z, y)), 0.25)
    assert torch.isfinite(told["weight"]).all()
    assert (margin_logits(z[None], told)[:, :2] == BETWEEN).all()


def test_only_directions_of_features_count() -> None:
    z, y = one(MIXED)
    told = margins(seen((z, y)), 0.25)
    torch.testing.assert_close(margin_logits(7 * z[None], told), margin_logits(z[None], told), **EXACT)
    assert margin_logits(z[None].float(), told).dtype == torch.float32
