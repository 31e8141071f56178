"""How well the right item is ranked: hit rate, NDCG and reciprocal rank, as expected over the order of ties.

With H candidates above the right item and T others equal to it, its rank is one of H + 1 .. H + T + 1, each as likely.
With D(r) the sum of a figure over the ranks 1 .. r, its expected value is

    (D(H + T + 1) - D(H)) / (T + 1)

so a model that scores all items alike gets what chance gets. Items that are no candidates have the score -inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.kernel.objective import Metric

CUT = 10  # ranks that count
SAMPLED = 99  # other items that papers rank the right one against

Gain = Callable[[Tensor], Tensor]  # rank, from 1 -> what it is worth


def gain_of_hit(rank: Tensor, cut: int = CUT) -> Tensor:
    """Return 1 for the first ranks."""
    return (rank <= cut).to(torch.get_default_dtype())


def gain_of_place(rank: Tensor, cut: int = CUT) -> Tensor:
    """Return what NDCG counts for a rank when there is one right item."""
    return torch.where(rank <= cut, 1 / torch.log2(1 + rank.to(torch.get_default_dtype())), 0)


def gain_of_inverse(rank: Tensor) -> Tensor:
    """Return the reciprocal rank."""
    return 1 / rank.to(torch.get_default_dtype())


def expected_gain(gain: Gain, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the expected gain of the right item among all candidates, one value per sample."""
    right = outputs.gather(1, targets[:, None])
    above = (outputs > right).sum(1)
    tied = (outputs == right).sum(1) - 1
    ranks = torch.arange(1, outputs.shape[1] + 1, device=outputs.device)
    up_to = torch.nn.functional.pad(gain(ranks).to(outputs.dtype).cumsum(0), (1, 0))
    return (up_to[above + tied + 1] - up_to[above]) / (tied + 1)


def expected_sampled_gain(gain: Gain, outputs: Tensor, targets: Tensor, sampled: int = SAMPLED) -> Tensor:
    """Return the expected gain where the right item is ranked among `sampled` random candidates only.

    With true rank r among N candidates, h of the sampled ones are above it by the hypergeometric distribution of
    `sampled` draws from N - 1 items of which r - 1 are better. Its mean over all draws is returned, so nothing is
    drawn and nothing is noise.
    """
    others = (outputs > -torch.inf).sum(1) - 1
    right = outputs.gather(1, targets[:, None])
    above, tied = (outputs > right).sum(1), (outputs == right).sum(1) - 1
    counts = torch.arange(outputs.shape[1], device=outputs.device)  # of items that are better, or that are not
    found = counts[:CUT]  # better ones that were drawn: with more of them, nothing counts
    drawn = others.clamp(max=sampled)
    worse = others[:, None] - counts
    log_factorial = torch.lgamma(torch.arange(1, len(counts) + sampled + 2, device=counts.device).double())
    choose = functools.partial(_log_choose, log_factorial)
    log_worse = choose(worse[:, :, None], drawn[:, None, None] - found)
    log_share = choose(counts[:, None], found) + log_worse - choose(others, drawn)[:, None, None]
    of_rank = (log_share.exp() * gain(found + 1).double()).sum(2)
    up_to = torch.nn.functional.pad(of_rank.cumsum(1), (1, 0))
    low, high = up_to.gather(1, torch.stack([above, above + tied + 1], 1)).unbind(1)
    return ((high - low) / (tied + 1)).to(outputs.dtype)


def _log_choose(log_factorial: Tensor, total: Tensor, chosen: Tensor) -> Tensor:
    """Return the logarithm of a binomial coefficient of whole numbers; -inf where it is 0."""
    rest = total - chosen
    value = log_factorial[total.clamp(min=0)] - log_factorial[chosen.clamp(min=0)] - log_factorial[rest.clamp(min=0)]
    return torch.where((chosen >= 0) & (rest >= 0), value, -torch.inf)


RANKINGS: dict[str, Metric] = {
    "hr@10": Metric("hit rate at 10", functools.partial(expected_gain, gain_of_hit), share=True),
    "ndcg@10": Metric("NDCG at 10", functools.partial(expected_gain, gain_of_place), share=True),
    "mrr": Metric("mean reciprocal rank", functools.partial(expected_gain, gain_of_inverse), share=True),
    "hr@10-of-99": Metric(
        "hit rate at 10 among 99 others", functools.partial(expected_sampled_gain, gain_of_hit), share=True
    ),
    "ndcg@10-of-99": Metric(
        "NDCG at 10 among 99 others", functools.partial(expected_sampled_gain, gain_of_place), share=True
    ),
}
