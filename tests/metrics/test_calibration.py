import math

import numpy as np
import pytest
import torch
from torch.func import vmap

from atoll.kernel.randomness import generator
from atoll.metrics.calibration import bins, ece


def draw(*shape):
    rng = generator(0, "test confidence")
    confidence = torch.from_numpy(rng.random(shape))
    return confidence, torch.from_numpy(rng.random(shape)) < confidence**2


def by_definition(confidence, right, number):
    """sum_b n_b / n |accuracy_b - confidence_b|, bin by bin."""
    total = 0.0
    for i in range(number):
        inside = (confidence > i / number) & (confidence <= (i + 1) / number)
        if inside.any():
            gap = right[inside].double().mean() - confidence[inside].mean()
            total += inside.double().mean().item() * abs(gap.item())
    return total


def test_by_hand():
    confidence = torch.tensor([0.9, 0.8, 0.6, 0.2], dtype=torch.float64)
    right = torch.tensor([True, False, True, True])
    sums = bins(confidence, right, 2)
    # 0.2 is in (0, 0.5]; the others in (0.5, 1], with confidence 2.3 and 2 right.
    torch.testing.assert_close(sums, torch.tensor([[1, 3], [0.2, 2.3], [1, 2]], dtype=torch.float64))
    # 1/4 * |1/1 - 0.2/1| + 3/4 * |2/3 - 2.3/3| = 0.8/4 + 0.3/4
    assert ece(*sums) == pytest.approx(0.275, abs=1e-12)


@pytest.mark.parametrize("number", [1, 10, 15])
def test_is_the_usual_definition(number):
    confidence, right = draw(200)
    assert ece(*bins(confidence, right, number)) == pytest.approx(by_definition(confidence, right, number), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_include_their_right_edge(dtype):
    edges = torch.arange(16, dtype=dtype) / 15
    counts = bins(edges, torch.ones(16), 15)[0]
    assert counts.tolist() == [2, *[1] * 14]  # 0 joins the first
    above = bins(edges.nextafter(torch.tensor(2.0, dtype=dtype)), torch.ones(16), 15)[0]
    assert above.tolist() == [*[1] * 14, 2]  # what lies above 1 by rounding joins the last


def test_sums_add_up_over_batches_and_padding_counts_nothing():
    confidence, right = draw(50)
    whole = bins(confidence, right)
    assert whole.shape == (3, 15)
    padded = torch.cat([confidence[30:], confidence[:12]]), torch.cat([right[30:], right[:12]])
    mask = torch.cat([torch.ones(20), torch.zeros(12)]).double()
    parts = bins(confidence[:30], right[:30]) + bins(*padded, weight=mask)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


def test_under_vmap():
    confidence, right = draw(4, 30)
    weight = (torch.arange(30) < torch.tensor([[30], [20], [1], [0]])).double()
    together = vmap(lambda c, r, w: bins(c, r, weight=w))(confidence, right, weight)
    alone = torch.stack([bins(confidence[k], right[k], weight=weight[k]) for k in range(4)])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    errors = ece(*together.movedim(1, 0).numpy())
    assert errors.shape == (4,)
    for client, samples in enumerate([30, 20, 1]):
        of_client = confidence[client, :samples], right[client, :samples]
        assert errors[client] == pytest.approx(by_definition(*of_client, 15), abs=1e-12)
    assert math.isnan(errors[3])  # no samples


def test_a_calibrated_model_has_none():
    counts = np.array([0, 4, 10])
    assert ece(counts, counts * [0.3, 0.5, 0.9], [0, 2, 9]) == pytest.approx(0, abs=1e-12)


def test_a_model_that_answers_nan_has_no_calibration():
    assert math.isnan(ece(*bins(torch.tensor([0.5, math.nan]), torch.tensor([True, False]))))
