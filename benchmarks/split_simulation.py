"""How often the interval of a gain covers the true gain: samples cut class by class, at random, and in folds.

    python benchmarks/split_simulation.py                       # 400 federations a cell, about two minutes
    python benchmarks/split_simulation.py --federations 50

Clients with few yes/no outcomes, each with a rate of its own (an effect) or all with the same (none). The personal
model is a client's own rate, shrunken to the common one; the shared model is the common rate. Both are judged by the
Brier score. The true gain is known: E (q - y)^2 = p (1 - p) + (q - p)^2.

- class by class: three cuts with a fixed sequence of turns over samples sorted by class, as Atoll cut until 0.1, and
  the t-interval over these three;
- at random: three random cuts of the same sizes, and the same interval;
- folds: two repeats of five folds, and the interval over clients and cuts that tables of own data have now.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from atoll.data.splits import SHARES, Cut, cut_splits, deal_turns, list_cuts
from atoll.kernel.randomness import generator
from atoll.metrics import significance
from atoll.metrics.gains import estimate_gain

RATE, SHRINKAGE = 0.3, 4.0  # the common rate; pseudo-samples of it in a client's own
Values = NDArray[np.float64]


def draw_federation(
    clients: int, effect: float, seed: int
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]], Values]:
    """Return all outcomes, the rows of each client, and each client's true rate."""
    draw = generator(seed, "federation", clients)
    sizes = np.maximum(np.exp(draw.normal(np.log(30), 0.6, clients)).astype(int), 6)
    logits = np.log(RATE / (1 - RATE)) + effect * draw.normal(size=clients)
    rates = 1 / (1 + np.exp(-logits))
    outcomes = (draw.random(sizes.sum()) < np.repeat(rates, sizes)).astype(np.int64)
    return outcomes, np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1]), rates


def cut_by_class(
    parts: list[NDArray[np.int64]], outcomes: NDArray[np.int64], seed: int
) -> list[list[NDArray[np.int64]]]:
    """Cut as Atoll did: samples sorted by class, and one sequence of turns for everybody."""
    found = []
    for client, part in enumerate(parts):
        order = generator(seed, "split", client).permutation(part)
        order = order[np.argsort(outcomes[order], kind="stable")]
        turns = deal_turns(SHARES, len(order))
        found.append([order[turns == side] for side in range(3)])
    return found


def cut_now(parts: list[NDArray[np.int64]], cut: Cut, seed: int) -> list[list[NDArray[np.int64]]]:
    splits = [(split.order.numpy(), split.offsets) for split in cut_splits(parts, cut, None, None, seed).values()]
    return [[order[ends[k] : ends[k + 1]] for order, ends in splits] for k in range(len(parts))]


def judge(
    pieces: list[list[NDArray[np.int64]]], outcomes: NDArray[np.int64], rates: Values, noise: float, seed: int
) -> tuple[Values, Values, Values]:
    """Return the sum of gains over each client's test samples, their number, and the true gain of each client."""
    train = [outcomes[one[0]] for one in pieces]
    common = np.concatenate(train).mean()
    own = np.array([(one.sum() + SHRINKAGE * common) / (len(one) + SHRINKAGE) for one in train])
    # what differs from run to run for all clients alike, as a shared model's training does
    shift = noise * generator(seed, "run").normal()
    common = 1 / (1 + np.exp(-np.log(common / (1 - common)) - shift))
    gains = [
        ((common - outcomes[one[2]]) ** 2 - (q - outcomes[one[2]]) ** 2).sum()
        for one, q in zip(pieces, own, strict=True)
    ]
    truth = (common - rates) ** 2 - (own - rates) ** 2
    return np.array(gains), np.array([len(one[2]) for one in pieces]), truth


def play(clients: int, effect: float, noise: float, seed: int) -> dict[str, tuple[float, float | None, float]]:
    """Return for each way of cutting the estimated gain, half its interval, and the true gain."""
    outcomes, parts, rates = draw_federation(clients, effect, seed)
    found = {}
    ways = {
        "class by class": lambda number: cut_by_class(parts, outcomes, 1000 * seed + number),
        "at random": lambda number: cut_now(parts, Cut(), 1000 * seed + number),
    }
    for name, cut in ways.items():
        runs = [judge(cut(number), outcomes, rates, noise, 1000 * seed + number) for number in range(3)]
        means = [float(np.mean(gains / sizes)) for gains, sizes, _ in runs]
        found[name] = (
            float(np.mean(means)),
            significance.interval(means),
            float(np.mean([truth for *_, truth in runs])),
        )
    cuts = list_cuts(5, 2)
    runs = [judge(cut_now(parts, cut, seed), outcomes, rates, noise, 1000 * seed + cut.number) for cut in cuts]
    repeats = np.stack(
        [
            np.sum([gains for gains, *_ in runs[at : at + 5]], axis=0)
            / np.sum([sizes for _, sizes, _ in runs[at : at + 5]], axis=0)
            for at in (0, 5)
        ]
    )
    gain = estimate_gain(repeats)
    found["folds"] = (gain.mean, gain.half, float(np.mean([truth for *_, truth in runs])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--federations", type=int, default=400)
    many = parser.parse_args().federations
    print("| effect | clients | cut | true gain | found | covered | above the truth | called a gain | width |")
    print("|---|---|---|---|---|---|---|---|---|")
    for effect, noise in ((0.0, 0.15), (0.0, 0.0), (1.0, 0.05)):
        for clients in (8, 17, 79):
            played = [play(clients, effect, noise, seed) for seed in range(many)]
            # the gain of clients like these, of which every federation is a sample
            truth = float(np.mean([one[2] for found in played for one in found.values()]))
            for way in played[0]:
                mean, half = (np.array([found[way][place] for found in played]) for place in (0, 1))
                covered, low = np.abs(mean - truth) <= half, mean - half
                print(
                    f"| {'none' if not effect else 'planted'}, noise {noise:g} | {clients} | {way} | {truth:+.4f} "
                    f"| {mean.mean():+.4f} | {covered.mean():.2f} | {(low > truth).mean():.3f} "
                    f"| {(low > 0).mean():.2f} | {2 * half.mean():.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
