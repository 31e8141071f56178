"""How alike clients are: directions, their alignment, links and propagation, on matrices small enough for paper."""

import math

import numpy as np
import pytest
import torch

from atoll.kernel.errors import CohortError, HyperparameterError
from atoll.kernel.randomness import default_generator, generator
from atoll.toolbox.server.similarity import (
    alignment,
    among_known,
    bases,
    directions,
    leading,
    links,
    private_moment,
    propagation,
)

with default_generator(3):
    ROWS = torch.randn(7, 5, dtype=torch.float64)
CIRCLE = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
HALVES = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.2, 0.8, 0.0]], dtype=torch.float64)


# -- directions ----------------------------------------------------------------------------------------------------


def test_directions_are_those_of_the_exact_svd() -> None:
    found = directions(ROWS, 3)
    torch.testing.assert_close(found @ found.T, torch.eye(3).double())
    # The rows keep in q directions what the q largest singular values say, and no q directions keep more.
    kept = (ROWS @ found.T).square().sum()
    torch.testing.assert_close(kept, torch.linalg.svdvals(ROWS)[:3].square().sum())


def test_their_sign_does_not_depend_on_that_of_the_rows() -> None:
    # catches: bases whose sign a library chooses, so that machines disagree on what was sent
    assert torch.equal(directions(-ROWS, 2), directions(ROWS, 2))
    assert (directions(ROWS, 5).abs().max(1).values == directions(ROWS, 5).max(1).values).all()


def test_what_the_rows_do_not_span_is_zero() -> None:
    found = directions(torch.tensor([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0]]), 3)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8, 0], [0, 0, 0], [0, 0, 0]]).double())
    assert not directions(torch.zeros(0, 4), 2).any()
    assert not directions(torch.zeros(3, 4), 2).any()


def test_one_sample_is_its_own_direction() -> None:
    # Stated on the page: a client with a single sample tells it, up to its length.
    x = torch.tensor([[1.0, 2.0, 2.0]])
    _, plain = bases(x, torch.zeros(1, 0), 1)
    torch.testing.assert_close(plain[0, 0], x[0].double() / 3)


def test_a_centred_client_does_not_tell_its_mean() -> None:
    x = torch.tensor([[10.0, 1.0], [10.0, -1.0]])
    assert bases(x, torch.zeros(2, 0), 1)[1][0, 0].tolist() == pytest.approx([1, 0])
    assert bases(x, torch.zeros(2, 0), 1, center=True)[1][0, 0].tolist() == pytest.approx([0, 1])


def test_labels_stand_beside_the_samples() -> None:
    # [x, y] = [2, 1, 0] twice: its direction is (2, 1, 0) / sqrt(5).
    basis, plain = bases(torch.full((2, 1), 2.0), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 1)
    torch.testing.assert_close(basis, torch.tensor([[[2.0, 1.0, 0.0]]]).double() / math.sqrt(5))
    assert plain.tolist() == [[[1.0]]]


def test_every_class_has_directions_of_its_own_times_the_root_of_its_share() -> None:
    x = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    y = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    basis, _ = bases(x, y, 1, by_class=True)
    root = [[[math.sqrt(2 / 3), 0]], [[0, 0]], [[0, math.sqrt(1 / 3)]]]
    torch.testing.assert_close(basis, torch.tensor(root).double())


# -- private directions --------------------------------------------------------------------------------------------


def test_one_row_moves_a_private_moment_by_at_most_one() -> None:
    # The sensitivity on which the guarantee rests; the noise is the same in both.
    long = torch.cat([ROWS, torch.tensor([[30.0, -40.0, 0.0, 0.0, 0.0]]).double()])
    with_it, without = (private_moment(rows, 0.7, generator(0, "noise")) for rows in (long, ROWS))
    assert torch.linalg.matrix_norm(with_it - without) == pytest.approx(1)
    torch.testing.assert_close(with_it, with_it.T)


def test_the_noise_has_the_scale_that_was_asked_for() -> None:
    noise = private_moment(torch.zeros(1, 200), 0.5, generator(0, "noise"))
    assert noise[0, 1:].std() == pytest.approx(0.5, rel=0.2)
    assert noise.triu().square().sum() / (200 * 201 / 2) == pytest.approx(0.25, rel=0.05)


def test_without_noise_both_ways_lead_to_the_same_directions() -> None:
    rows = ROWS / ROWS.norm(dim=1, keepdim=True)
    torch.testing.assert_close(leading(private_moment(rows, 0.0, generator(0, "noise")), 2), directions(rows, 2))


def test_the_private_plain_basis_comes_from_the_same_noisy_moment() -> None:
    # Nothing is asked of the samples twice: for t = 0 both are the same matrix.
    basis, plain = bases(ROWS, ROWS[:, :0], 2, noise=0.4, rng=generator(0, "noise"))
    assert torch.equal(basis, plain)
    assert not torch.allclose(plain[0], directions(ROWS, 2))


# -- alignment -----------------------------------------------------------------------------------------------------


def test_one_direction_each_is_the_cosine_without_its_sign() -> None:
    ours = torch.tensor([[[[1.0, 0.0]]], [[[0.6, -0.8]]]])
    torch.testing.assert_close(alignment(ours, ours), torch.tensor([[1, 0.6], [0.6, 1]]).double())


def test_a_plane_is_the_same_however_it_is_spanned() -> None:
    one = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    turned = torch.tensor([[0.6, 0.8, 0.0], [-0.8, 0.6, 0.0]])
    other = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # one angle is 0, the other 90 degrees
    found = alignment(one[None, None], torch.stack([turned, other])[:, None])
    assert found[0].tolist() == pytest.approx([1, 0.5])


def test_clients_with_other_classes_have_nothing_in_common() -> None:
    x, first, second = torch.ones(2, 3), torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[0.0, 1.0]] * 2)
    parts = [bases(x, y, 1, by_class=True)[0] for y in (first, second, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))]
    found = alignment(torch.stack(parts), torch.stack(parts))
    half = math.sqrt(0.5)
    torch.testing.assert_close(found, torch.tensor([[1, 0, half], [0, 1, half], [half, half, 1]]).double())


def test_a_client_with_samples_of_another_shape_is_refused() -> None:
    with pytest.raises(CohortError, match=r"bases of one shape.*\(1, 1, 4\) and \(1, 1, 3\).*\nhint: "):
        alignment(torch.ones(1, 1, 1, 4), torch.ones(2, 1, 1, 3))


# -- links and propagation -----------------------------------------------------------------------------------------


def test_links_are_a_softmax_over_the_nearest() -> None:
    scores = torch.tensor([[9.0, 0.1, 0.3, 0.2]], dtype=torch.float64)
    found = links(scores, 2, 10.0, among=torch.tensor([[False, True, True, True]]))
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(found, torch.tensor([[0, 0, share, 1 - share]]).double())


def test_of_equals_the_first_are_taken_and_of_few_all() -> None:
    scores, all_but_first = torch.zeros(1, 4), torch.tensor([[False, True, True, True]])
    assert links(scores, 2, 10.0, among=all_but_first).tolist() == [[0, 0.5, 0.5, 0]]
    assert links(scores, 9, 0.0, among=all_but_first)[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert links(scores, 2, 10.0, among=torch.zeros(1, 4, dtype=torch.bool)).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("stochastic", [CIRCLE, HALVES], ids=["circle", "halves"])
def test_rows_of_the_propagation_are_distributions(stochastic: torch.Tensor, alpha: float) -> None:
    found = propagation(stochastic, alpha)
    torch.testing.assert_close(found.sum(1), torch.ones(3).double())
    assert found.min() >= 0
    torch.testing.assert_close(found, (1 - alpha) * torch.eye(3).double() + alpha * stochastic @ found)


def test_propagation_follows_walks_of_any_length() -> None:
    walks = [0.5**steps * torch.linalg.matrix_power(HALVES, steps) for steps in range(60)]
    torch.testing.assert_close(propagation(HALVES, 0.5), 0.5 * torch.stack(walks).sum(0))


def test_around_a_circle_by_hand() -> None:
    # (1 - a) (1, a, a^2) / (1 - a^3) with a = 1/2.
    assert propagation(CIRCLE, 0.5)[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def random_links(seed: int) -> torch.Tensor:
    """Draw links of several islands: each a chain, a circle or few links at random, or a client with only itself."""
    draw = generator(seed, "links")
    n = int(draw.integers(2, 41))
    island, order = draw.integers(max(1, n // 3), size=n), draw.permutation(n)
    S = np.zeros((n, n))
    for group in range(n):
        mine = order[island[order] == group]
        if len(mine) < 2:
            continue
        kind = draw.integers(3)
        for place, client in enumerate(mine):
            others = np.delete(mine, place)
            few = draw.choice(others, size=min(len(others), int(draw.integers(1, 4))), replace=False)
            ahead = mine[place + 1 :][:1] if kind == 0 else mine[[(place + 1) % len(mine)]]
            heard = few if kind == 2 else ahead
            S[client, heard] = draw.dirichlet(np.ones(len(heard))) if len(heard) else 0
    alone = S.sum(1) == 0
    S[alone, alone] = 1
    return torch.from_numpy(S / S.sum(1, keepdims=True))


def reachable_by_walking(S: torch.Tensor) -> torch.Tensor:
    """Find who is reached from each client by following links one after another."""
    reach = torch.zeros_like(S, dtype=torch.bool)
    for start in range(len(S)):
        found, waiting = {start}, [start]
        while waiting:
            here = waiting.pop()
            new = {other for other in range(len(S)) if S[here, other] > 0} - found
            found |= new
            waiting += new
        reach[start, list(found)] = True
    return reach


@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.999])
@pytest.mark.parametrize("seed", range(40))
def test_models_reach_exactly_those_to_whom_links_lead(seed: int, alpha: float) -> None:
    # catches: zeros of an inverse that are 1e-17, with which a stranger becomes the only one to learn from
    S = random_links(seed)
    P, reach = propagation(S, alpha), reachable_by_walking(S)
    assert torch.equal(P > 0, reach)
    assert torch.equal(P.float() > 0, reach)
    walks, step = torch.eye(len(S), dtype=S.dtype), alpha * S
    for _ in range(16):  # walks of fewer than 2^16 steps
        walks, step = walks + step @ walks, step @ step
    torch.testing.assert_close(P, (1 - alpha) * walks, rtol=1e-9, atol=0.0)
    known = torch.from_numpy(generator(seed, "known").random(len(S)) < 0.3)
    heard = among_known(P.float(), known)
    nobody = ~(reach & known).any(1)
    assert torch.equal(heard > 0, torch.where(nobody[:, None], torch.eye(len(S), dtype=torch.bool), reach & known))
    torch.testing.assert_close(heard.sum(1), torch.ones(len(S)))


def test_without_propagation_nobody_is_reached() -> None:
    S = random_links(3)
    assert torch.equal(propagation(S, 0.0), torch.eye(len(S)).double())


def test_the_end_of_a_long_chain_is_reached_in_single_precision() -> None:
    # 0.1^399 is no number in any precision, and still the last client is the only one to learn from.
    S = torch.diag(torch.ones(399, dtype=torch.float64), 1)
    S[-1, -1] = 1
    last = torch.arange(400) == 399
    assert among_known(propagation(S, 0.1).float(), last)[0].tolist() == last.float().tolist()


def test_a_singular_propagation_is_refused() -> None:
    with pytest.raises(HyperparameterError, match=r"`alpha` must be a float in \[0, 1\). Got 1.0"):
        propagation(CIRCLE, 1.0)


@pytest.mark.parametrize("wrong", [HALVES * 1.1, HALVES - CIRCLE + HALVES], ids=["sum", "sign"])
def test_what_is_not_stochastic_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(CohortError, match="Rows of links must be distributions"):
        propagation(wrong, 0.5)


def test_who_was_never_heard_of_is_left_out() -> None:
    found = among_known(HALVES, torch.tensor([False, True, False]))
    assert found.tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0]]  # the second gets nothing, so that it has itself
    assert torch.equal(among_known(HALVES, torch.tensor([True, True, True])), HALVES)
