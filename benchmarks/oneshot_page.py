"""The page docs/results/oneshot.md: the one-shot tables in Markdown."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oneshot_cells import (
    ABLATION,
    ANSWERS,
    ARMS,
    CONFLICTS,
    CONTROLS,
    FRAMES,
    FULL,
    HEADS,
    NOISE,
    OTHERS,
    PUBLIC_WORDS,
    REFINED,
    RELEASED,
    REPEATS,
    RIVALS,
    SERVERS,
    SMALL,
    STAGES,
    TINY,
    WALK,
    Scale,
    added,
    singles,
    speeds,
    walk,
    with_epochs,
)
from published import mean_text, origins, table

Figures = dict[str, Any]
Found = Mapping[int, Figures]  # by seed
Measure = Callable[[Figures], float]


COSTS = ("MB up", "MB deployed")
MARGINS = "fafi-plus:own=1,own_by=margins"  # the answer that the page is about


def page(done: list[Figures]) -> str:
    """Everything that has been run so far."""
    whole = [one for one in done if "unfinished" not in one]
    small = [one for one in whole if one["task"].startswith(SMALL.name)]
    tiny = [one for one in whole if one["task"].startswith(TINY.name)]
    large = [one for one in whole if not one["task"].startswith((SMALL.name, TINY.name))]
    return f"""{HEAD}
## CIFAR-10, ResNet-18

{FULL_SHORT if large else ""}
{_undecided() if large else ""}
{_sections(FULL, large) if large else NOT_YET}
{FULL_COMMENT if large else ""}
{_speed(large)}
## Fashion-MNIST, 6,000 images, a small CNN, two CPU cores

The same tables for a computer without a GPU:
`python benchmarks/oneshot.py --small --engine 'loop traced one_core' --jobs 2`.

{_sections(SMALL, small) if small else NOT_YET}
{SMALL_COMMENT}{DIGITS}{REHEARSAL + _sections(TINY, tiny) if tiny else ""}"""


NOT_YET = "Not run yet.\n"
REHEARSAL = "\n## A rehearsal, whose figures mean nothing\n\n"


def _sections(scale: Scale, done: Sequence[Figures]) -> str:
    cells = len(scale.cells())
    found = [one for one in done if "speed" not in one["task"]]
    return "\n".join([
        f"Cells so far: {len(found)} of {cells}, on {origins(found) or 'nothing'}.\n",
        *(_corrected(scale, alpha, done) for alpha in scale.alphas),
        *([_controls(scale, done)] if scale.controls else []),
        _conflict(scale, done),
        *(_ladder(scale, alpha, done) for alpha in scale.ladder),
        *(_candidates(scale, alpha, done) for alpha in scale.ladder),
        *(_fusion(scale, alpha, done) for alpha in scale.ladder),
        *filter(None, [
            _noise(scale, done), _walk(scale, done), *(_stages(scale, alpha, done) for alpha in scale.ladder),
            *(_ablation(scale, alpha, done) for alpha in scale.alphas),
            *(_rivals(scale, alpha, done) for alpha in scale.alphas),
        ]),
    ])  # fmt: skip


# -- what the tables read ----------------------------------------------------------------------------------------------


def _of(done: Iterable[Figures], task: str, method: str) -> Found:
    """The cells of one method on one task, by seed."""
    return {one["seed"]: one for one in done if one["task"] == task and one["method"] == method}


def score(one: Figures) -> float:
    """Of what everybody deploys, on the server's test set."""
    return float(one["curve"][-1]["central"])


def validation(one: Figures) -> float:
    """Of the same on the pooled validation samples."""
    last = one["curve"][-1]
    return float(last.get("shared_val_micro", last["val_micro"]))


def _seed_sets(found: Iterable[Found]) -> list[frozenset[int]]:
    """Return the sets of seeds that cells have, the smallest first: a table holds rows of one of them."""
    return sorted({frozenset(one) for one in found if one}, key=lambda seeds: (len(seeds), sorted(seeds)))


def _with(found: Found, seeds: frozenset[int]) -> Found:
    """Return the cells of these seeds, or none if one is missing."""
    return {seed: found[seed] for seed in sorted(seeds)} if seeds <= found.keys() else {}


def _mean(found: Found, measure: Measure) -> str:
    return mean_text([measure(one) for one in found.values()]) or "–"


def _cost(found: Found) -> list[str]:
    """Return megabytes up and deployed."""
    ones = list(found.values())
    return [f"{sum(one[way] for one in ones) / len(ones) / 1e6:.1f}" for way in ("up", "deployed")]


def _difference(found: Found, reference: Found) -> str:
    """Return the mean of paired differences, with its interval if there are several; none if a pair is missing."""
    from atoll.metrics.significance import paired_interval

    seeds = sorted(found)
    if not found.keys() <= reference.keys():
        return "–"
    if all(found[seed] is reference[seed] for seed in seeds):
        return ""  # the reference itself
    mine, theirs = ([score(ones[seed]) for seed in seeds] for ones in (found, reference))
    mean, half = paired_interval(mine, theirs)
    return f"{mean:+.2f}" if half is None else f"{mean:+.2f} ± {half:.2f}"


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: str = "") -> str:
    body = f"{table(heads, rows)}\n" if rows else NOT_YET
    return f"### {title}\n\n{f'{words}{chr(10)}{chr(10)}' if words and rows else ''}{body}"


APART = "One seed: a difference of two cells that were trained separately is uncertain by ±{noise} points."
TOGETHER = "One training: how much these figures vary from training to training was not measured."


def _by_seeds(
    scale: Scale,
    title: str,
    heads: Sequence[str],
    found: Iterable[Found],
    rows: Callable[[frozenset[int]], Sequence[Sequence[str]]],
    words: str = "",
    caution: str = APART,
) -> str:
    """Return a table for every set of seeds, so means over seeds never stand beside single cells."""
    sections = []
    for seeds in _seed_sets(found):
        named = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, sorted(seeds)))}"
        alone = caution.format(noise=scale.noise) if scale.noise and len(seeds) == 1 else ""
        said = " ".join(filter(None, [words, alone]))
        sections.append(_section(f"{title}, {named}", heads, rows(seeds), said))
    return "\n".join(sections) or _section(title, heads, [])


# -- the tables that settle something: each appears when some of its cells are there -----------------------------------


def _noise(scale: Scale, done: Sequence[Figures]) -> str:
    """Return how much the same cell varies."""
    last, rows = scale.epochs[-1], list[list[str]]()
    for alpha in scale.alphas:
        for how, method in NOISE.items():
            tasks = [f"{scale.name}noise-{how.replace(' ', '-')}-{k}-a{alpha:g}-e{last}" for k in range(REPEATS)]
            scores = [score(one) for task in tasks for one in _of(done, task, with_epochs(method, last)).values()]
            if len(scores) == REPEATS:
                rows.append([f"{alpha:g}", how, mean_text(scores), f"{max(scores) - min(scores):.2f}"])
    words = f"FAFI, clean, {last} epochs, {REPEATS} times with seed {scale.seeds[0]}: mean ± standard deviation."
    heads = ["Dirichlet", "how", "score", "largest difference"]
    return _section("How much a cell varies", heads, rows, words) if rows else ""


def _table(
    scale: Scale,
    table: str,
    title: str,
    alpha: float,
    named: Mapping[str, str],
    references: Mapping[str, str],
    done: Sequence[Figures],
    *,
    ordered: bool = False,
) -> str:
    """Return methods with their differences from some of them, for every set of seeds."""
    last = scale.epochs[-1]

    def find(method: str) -> Found:
        return _of(done, f"{scale.name}{table}-a{alpha:g}-e{last}", with_epochs(method, last))

    against = {called: find(method) for called, method in references.items()}

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        shown = [(called, method, _with(find(method), seeds)) for called, method in named.items()]
        kept = [one for one in shown if one[2]]
        kept = sorted(kept, key=lambda one: _average(one[2], score)) if ordered else kept
        return [
            [called, f"`{method}`", _mean(found, score), *(_difference(found, other) for other in against.values()),
             *_cost(found)]
            for called, method, found in kept
        ]  # fmt: skip

    heads = ["method", "written", "score", *(f"minus {called}" for called in references), *COSTS]
    cells = [find(method) for method in named.values()]
    words = f"{last} epochs, Dirichlet {alpha:g}."
    return _by_seeds(scale, f"{title}, Dirichlet {alpha:g}", heads, cells, rows, words) if any(cells) else ""


def _walk(scale: Scale, done: Sequence[Figures]) -> str:
    """Return the way from the released settings to the clean profile, and every option alone."""
    options = [f"{option}={value}" for option, value in WALK.items()]
    names = ["FAFI, released settings", *(f"and `{option}`" for option in options)]
    named = dict(zip(names, walk(), strict=True)) | {
        f"only `{option}`": method for option, method in zip(options[1:], singles(), strict=True)
    }
    reference = {"FAFI, released settings": "fafi:profile=faithful"}
    return _table(scale, "walk", "From released settings to clean", scale.alphas[0], named, reference, done)


def _stages(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    """Return two-stage training with other first stages, once they have been run."""
    tasks = {one["method"] for one in done if one["task"] == f"{scale.name}corrected-a{alpha:g}-e{scale.epochs[-1]}"}
    if not tasks & {with_epochs(method, scale.epochs[-1]) for method in STAGES}:
        return ""
    named = {"FAFI, clean": "fafi", "two-stage, a fifth": "fafi-two-stage"} | {method: method for method in STAGES}
    return _table(scale, "corrected", "Other stages", alpha, named, {"FAFI, clean": "fafi"}, done)


def _ablation(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    """Return what is left of margins without their parts: answers of the same clients."""
    title = "What margins are made of"
    return _table(scale, "ablation", title, alpha, ABLATION, {"margins": "fafi/margins"}, done)


def _rivals(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    """Return margins beside other ways to answer clients of few classes."""
    references = {
        "FAFI, released settings": "fafi:profile=faithful",
        "FAFI, clean": "fafi",
        "FAFI's clients, answered by margins": "fafi/margins",
    }
    return _table(scale, "rivals", "Margins and their rivals", alpha, RIVALS, references, done, ordered=True)


# -- the tables --------------------------------------------------------------------------------------------------------


def _corrected(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    def found(arm: str, epochs: int) -> Found:
        return _of(done, f"{scale.name}corrected-a{alpha:g}-e{epochs}", with_epochs(arm, epochs))

    last = scale.epochs[-1]

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        made = []
        for called, arm in ARMS.items():
            points = [_with(found(arm, epochs), seeds) for epochs in scale.epochs]
            if end := points[-1]:
                made.append([
                    called, f"`{arm}`", *(_mean(one, score) for one in points), _difference(end, found("fafi", last)),
                    *_cost(end),
                ])  # fmt: skip
        return made

    heads = ["arm", "written", *(f"{e} epochs" if e > 1 else "1 epoch" for e in scale.epochs), "minus FAFI, clean",
             *COSTS]  # fmt: skip
    ends = [found(arm, last) for arm in ARMS.values()]
    return _by_seeds(scale, f"The corrected table, Dirichlet {alpha:g}", heads, ends, rows)


def _controls(scale: Scale, done: Sequence[Figures]) -> str:
    alpha, last = scale.alphas[0], scale.epochs[-1]
    reference = _of(done, f"{scale.name}corrected-a{alpha:g}-e{last}", with_epochs("fafi", last))
    found = {
        called: _of(done, f"{scale.name}controls-a{alpha:g}-e{last}", with_epochs(arm, last))
        for called, arm in CONTROLS.items()
    }

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        return [
            [called, f"`{CONTROLS[called]}`", _mean(shown, score), _difference(shown, reference)]
            for called, one in found.items()
            if (shown := _with(one, seeds))
        ]

    heads = ["control", "written", f"{last} epochs", "minus FAFI, clean"]
    return _by_seeds(scale, f"Controls, Dirichlet {alpha:g}", heads, found.values(), rows)


def _conflict(scale: Scale, done: Sequence[Figures]) -> str:
    def cosine(one: Figures) -> float:
        found = one["observed"]["conflict"].values()
        return float(sum(found) / len(found))

    found = {
        (alpha, called): _of(done, f"{scale.name}conflict-a{alpha:g}-e{scale.short}", with_epochs(arm, scale.short))
        for alpha in scale.alphas
        for called, arm in CONFLICTS.items()
    }

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        made = []
        for (alpha, called), one in found.items():
            if shown := _with(one, seeds):
                each = [value for figures in shown.values() for value in figures["observed"]["conflict"].values()]
                made.append([
                    f"{alpha:g}", called, _mean(shown, cosine), f"{min(each):.2f} to {max(each):.2f}", str(len(each)),
                ])  # fmt: skip
        return made

    words = (
        "The cosine between the gradient of the contrast and that of the rest (classification, separation) in the "
        f"whole encoder, mean over the steps of {scale.short} epochs and over clients. 1: they agree; 0: they "
        "do not affect each other; below 0: they conflict."
    )
    heads = ["Dirichlet", "method", "cosine", "single clients", "clients"]
    return _by_seeds(scale, "Gradients of the two losses", heads, found.values(), rows, words, TOGETHER)


def _ladder(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    last, named = scale.epochs[-1], {**SERVERS, **FRAMES, **HEADS, **OTHERS}
    methods = {called: method.format(width=scale.width) for called, method in named.items()}

    def find(called: str) -> Found:
        epochs = None if called in HEADS else last
        task = f"{scale.name}ladder-a{alpha:g}" + (f"-e{epochs}" if epochs else "")
        return _of(done, task, with_epochs(methods[called], epochs))

    released, clean = find("FAFI, released settings"), find("FAFI, clean")
    candidates = {method: _candidate(scale, alpha, done, method, last) for method in scale.candidates}

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        shown = [(called, method, _with(find(called), seeds)) for called, method in methods.items()]
        shown.append(("FAFI's clients, answered by margins", MARGINS, _with(candidates[MARGINS], seeds)))
        for public, of in ((False, "without public samples"), (True, "with public samples")):
            if best := _best_candidate(candidates, seeds, public=public):
                shown.append((f"FAFI+ {of}: best on validation", *best))
        ordered = sorted((one for one in shown if one[2]), key=lambda one: _average(one[2], score))
        return [
            [called, f"`{method}`", _mean(found, score), _difference(found, released), _difference(found, clean),
             *_cost(found)]
            for called, method, found in ordered
        ]  # fmt: skip

    heads = ["method", "written", "score", "minus FAFI, released settings", "minus FAFI, clean", *COSTS]
    title = f"The ladder, Dirichlet {alpha:g}, {last} epochs"
    return _by_seeds(scale, title, heads, [*map(find, methods), *candidates.values()], rows)


def _average(found: Found, measure: Measure) -> float:
    return sum(map(measure, found.values())) / len(found)


def _candidate(scale: Scale, alpha: float, done: Sequence[Figures], method: str, epochs: int) -> Found:
    return _of(done, f"{scale.name}candidates-a{alpha:g}-e{epochs}", with_epochs(method, epochs))


def _best_candidate(
    candidates: Mapping[str, Found], seeds: frozenset[int], *, public: bool
) -> tuple[str, Found] | None:
    """Return the one that is best on validation over these seeds, of those with public samples or of those without."""
    found = {
        method: shown
        for method, one in candidates.items()
        if any(word in method for word in PUBLIC_WORDS) == public and (shown := _with(one, seeds))
    }
    return max(found.items(), key=lambda pair: _average(pair[1], validation), default=None)


def _candidates(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    """Return how clients train by how their answers are put together."""
    heads = ["clients train with", *ANSWERS, "refined with public labels"]
    words = "Validation / score of `fafi-plus`: rows are what is added to training, columns how a server answers."
    sections = []
    for epochs in sorted({scale.short, scale.epochs[-1]}):
        found = {
            one: [_candidate(scale, alpha, done, added(one, how), epochs) for how in (*ANSWERS.values(), REFINED[0])]
            for one in scale.trainings
        }
        cells = [cell for row in found.values() for cell in row]
        if any(cells) or epochs == scale.epochs[-1]:
            rows = functools.partial(_rows_of_candidates, found)
            title = f"What can be added to FAFI, Dirichlet {alpha:g}, {epochs} epochs"
            sections.append(_by_seeds(scale, title, heads, cells, rows, words, TOGETHER))
    return "\n".join(sections)


def _rows_of_candidates(found: Mapping[str, Sequence[Found]], seeds: frozenset[int]) -> list[list[str]]:
    rows = []
    for one, cells in found.items():
        shown = [_with(cell, seeds) for cell in cells]
        if any(shown):
            rows.append([f"`{one}`" if one else "FAFI's own", *map(_both, shown)])
    return rows


def _both(found: Found) -> str:
    return f"{_average(found, validation):.1f} / {_mean(found, score)}" if found else "–"


def _fusion(scale: Scale, alpha: float, done: Sequence[Figures]) -> str:
    """Rows: rule of fusion and unit length; columns: whose prototypes, and which statistics."""
    task, last = f"{scale.name}fusion-a{alpha:g}-e{scale.epochs[-1]}", scale.epochs[-1]
    statistics = (False, True) if scale.normalises else (False,)
    whose = {"all": "fafi:{how},averaging=all", "owners": "fafi:{how},averaging=owners",
             "by evidence": "fafi-plus:{how},dynamic=True"}  # fmt: skip
    found = {
        (fusion, normalise): [
            _of(done, task, with_epochs(
                method.format(how=f"fusion={fusion},normalise={normalise},batch_statistics={batch}"), last
            ))
            for batch in statistics
            for method in whose.values()
        ]
        for fusion in ("size", "uniform", "iffi", "iffi_code")
        for normalise in (False, True)
    }  # fmt: skip

    def rows(seeds: frozenset[int]) -> list[list[str]]:
        made = []
        for (fusion, normalise), cells in found.items():
            shown = [_with(cell, seeds) for cell in cells]
            if any(shown):
                features = "unit" if normalise else "as they are"
                made.append([f"`{fusion}`", features, *(_mean(one, score) for one in shown)])
        return made

    told = {False: "running statistics", True: "batch statistics"}
    columns = [f"{name}{f', {told[batch]}' if scale.normalises else ''}" for batch in statistics for name in whose]
    words = f"The same trained clients of FAFI, clean, {last} epochs; columns: whose prototypes are averaged" + (
        ", and which statistics BatchNorm uses at test (of training, or of 256 test samples)."
        if scale.normalises
        else ". The network has no BatchNorm."
    )
    cells = [cell for row in found.values() for cell in row]
    title = f"What a server makes of FAFI's clients, Dirichlet {alpha:g}"
    return _by_seeds(scale, title, ["rule", "features", *columns], cells, rows, words, TOGETHER)


def _speed(done: Sequence[Figures]) -> str:
    """Return the table of an epoch's seconds."""
    rows = []
    for cell in speeds():
        for one in _of(done, cell.task, cell.method).values():
            _, precision, *plan = cell.task.split("-")
            rows.append([
                precision, " ".join(plan), f"{one['seconds']:.2f}",
                f"{min(one['each']):.2f} to {max(one['each']):.2f}",
                f"{2 * one['images'] / one['seconds']:,.0f}", f"{RELEASED / one['seconds']:.1f}",
                f"{one['memory'] / 1e9:.1f}" if isinstance(one["memory"], int | float) else "–",
                one["commit"],
            ])  # fmt: skip
    words = (
        "One epoch of all five clients on FAFI's own overlapping split (`fafi:0.05:1`, 82,695 images, two views of "
        "each, batch 512, ResNet-18): a whole one-shot run with augmentation, fusion and evaluation on the official "
        "test set (`--only speed`). These runs had the GPU to themselves: all other processes were stopped while an "
        "epoch was timed. Of three timed runs the first is left out, because it includes waiting for the others to "
        f"stop. FAFI's released code (commit 26cf90e) took {RELEASED:.0f} s for an epoch with its own evaluations "
        "(H200, torch 2.11, seed 1); whether it ran alone is not recorded, so the ratio is rough. What PyTorch "
        "calls fp32 computes convolutions in TF32 on such a GPU by default: that is tf32 here, and the row "
        "nearest to the released code. fp32 is fp32 throughout, without tensor cores."
    )
    heads = ["precision", "programs", "seconds", "single runs", "views per second", "35 s / seconds", "GB", "commit"]
    return _section("Speed", heads, rows, words)


HEAD = """# One shot, on one protocol

`python benchmarks/oneshot.py` writes this page from [oneshot.json](oneshot.json); run it again to add the missing
cells. The protocol, which cells share their training, and a plan of the work are at the head of [the
script](../../benchmarks/oneshot.py). The [guide](../guides/one-shot.md) says what one shot means here and how to run
it.

**Scores** are accuracies in % of what everybody deploys (the fused model, the ensemble, the student), on a test set of
the server's own with all classes, after the last epoch; nothing is chosen on test. A seed decides partition, initial
model and draws, and is the same for all methods. Every table holds rows of the same seeds, and its title names them.
With several seeds, a score is the mean ± the standard deviation, and a difference is paired by seed, ± its 95 %
t-interval. With one seed, every score is a single cell.
*MB up* is the total of all five clients; *deployed* is what one of them must hold to answer by itself.

**No seconds** are in these tables: several cells ran at a time on one GPU, or on two CPU cores with other work, so
their seconds would reflect their neighbours. The [table of speed](#speed) was measured alone.

**FAFI, released settings** is `fafi:profile=faithful`, the closest to its released code that we run. It differs from
the release in three ways: samples are dealt disjointly (there, clients share samples); every image of a batch has its
own views (there, one draw of crop, flip and jitter serves the whole batch); test images are normalised as training
images are (there, they are not). It also trains for as many epochs, and on as many samples, as all cells of its table;
the release is configured for 300 epochs on all 50,000 training images (as read). **FAFI, clean** is `fafi`, our own
default ([what differs](../algorithms/fafi.md#from-the-released-code-to-what-it-describes)).
"""

FULL_SHORT = """### In short

**Margins against FAFI.** FAFI's clients, answered by [margins](../algorithms/oneshot-margins.md), are above *FAFI,
released settings* on the four partitions seen so far: **by 12.4, 15.5 and 12.5 points at Dirichlet 0.05, and by 13.0 at
0.1**. That is four partitions with one seed each: four differences of two single cells, each uncertain by ±7.7 (below),
without intervals. The clients train with the clean profile, so whole methods are compared, training and answer.
The first figure is of seed 0 (65.63 and 53.25, commits 11ac60e and 31063b5) and is in the ladder below, as is one
partition at Dirichlet 0.3 (seed 0): +11.7 (80.46 and 68.72). The other three were run separately: their cells are not
in [oneshot.json](oneshot.json), and their seeds and commit are not recorded, so this page cannot prove them.

**How much a cell varies.** The same cell, run again, gives a different score: sums on a GPU have no fixed order, and
the learning rate does not fall. Eight repeats of one cell have a standard deviation of 2.8 points, so the difference of
two single cells is uncertain by **±7.7** (95 %, with 2.8 taken as known; Student's t for eight repeats gives ±9.4).
**Cells of one seed decide nothing smaller than that**, and nothing about other partitions: FAFI, clean, reaches 35.6,
57.3 and 34.0 with seeds 0, 1 and 2. These repeats are not in oneshot.json either, and other cells may vary more or less
than the one that was repeated; only FAFI, clean, with seed 0 is in the record twice, in the corrected table and in the
study of fusion: 35.6 and 37.8 at 0.05, 75.3 and 76.6 at 0.3. Answers of the same trained clients share their training:
±7.7 is not the uncertainty of their differences, which was not measured for single seeds.

**Still open**: whether a public bank, its label mask, an image pool, a queue or two stages help or harm FAFI;
whether what they cost depends on skew; whether FAFI's two losses conflict; which rule of fusion is best; whether
statistics of the test batch explain the difference between FAFI's two profiles.
"""

# Of the notes, and what we would like to claim: the claim; what is known; the study that decides it.
CLAIMS = """
A cell varies by 2.8 points, and less with deterministic kernels or a falling step size;
    eight repeats of one cell, which are not in the record; noise
FAFI's released settings are better than our clean profile at 0.05, and some option is the reason;
    +17.7 at 0.05, one seed, ten options at once; walk
A public bank (V5) harms FAFI;
    +4.1, -2.1, -7.4 and -1.6, one partition for each alpha; arms
False negatives are the reason: a label mask removes the harm;
    +12.6 over FAFI at 0.05, -4.6 at 0.3, one partition each; arms
The harm grows with skew;
    no trend in one partition for each alpha; skew
Two stages (V6) remove it, if the first one is long enough;
    0.8 to 7.9 below FAFI, one partition each; arms
A label-aware queue helps;
    -5.9 to +1.5, one partition each; arms
The gradients of FAFI's two losses conflict;
    no mean cosine of 20 clients is below 0, over all layers (single layers and the released settings were not
    measured); none
Margins of FAFI's clients are above FAFI, released settings, on partitions that were not used to find them;
    +12.4, +15.5, +12.5 and +13.0, single cells, three of them not in the record; rivals
Margins are above FedOV;
    FedOV was not run on a GPU (on digits it is above margins at 0.05, by 16.1 ± 6.7); rivals
Margins are above class-weighted ensembles;
    +4.5 over the best one at 0.05, one seed, of clients that train by cross-entropy; rivals
One model distilled from margins keeps most of their score;
    56.0 of 64.6 at 0.05, one seed, of clients that train by cross-entropy; rivals
The common scale, the covariance and the votes of margins all matter;
    not measured on ResNet-18; ablation
Adaptive splitting (ABHS) helps ResNet-18;
    not run since its shared blocks learn from all clients (on digits they help where clients are alike); none
"""


def _undecided() -> str:
    claims = [[" ".join(part.split()) for part in one.split(";")] for one in re.split(r"\n(?=\S)", CLAIMS.strip())]
    rows = [
        [claim, "**not decided**", known, "–" if study == "none" else f"`python benchmarks/oneshot.py --study {study}`"]
        for claim, known, study in claims
    ]
    return _section("Not decided", ["claim", "verdict", "known so far", "what decides it"], rows, UNDECIDED)


UNDECIDED = """Claims of the notes, and what we would like to claim ourselves, on CIFAR-10 with ResNet-18. A command
runs what is missing, and can be stopped and repeated. Its cells; the command on a GPU, in parts of nine minutes; and a
rehearsal of minutes on a CPU, whose figures mean nothing:

```
python benchmarks/oneshot.py --study rivals --list
python benchmarks/oneshot.py --study rivals --device cuda --precision bf16 --together --minutes 9 \\
    --engine 'loop compiled graph channels_last'
python benchmarks/oneshot.py --study rivals --tiny --out FOLDER --runs FOLDER
```

No study has been run on a GPU yet."""

FULL_COMMENT = """
**What the tables show.** All arms, the ladder and the study of fusion have one partition for each alpha (seed 0); FAFI,
clean, and its answers have three at Dirichlet 0.05.

- *Answers of FAFI's clients* (0.05, three partitions, the same clients): margins reach 73.4, fused features 42.3
  (+31.1 ± 26.8), the clients' own prototypes 60.2 (+13.1 ± 11.4), prototypes refined with the labels of 5,000 public
  samples 74.1, which cannot be distinguished. The rule of margins was found on the small Fashion-MNIST tables (below),
  before anything was run here. Clients that train by cross-entropy reach 64.6 with margins at 0.05, and 68.8 at 0.3,
  where FAFI's reach 80.5 (one partition each).
- *Bank, label mask, image pool, queue, two stages: open.* Of these 24 differences to FAFI, clean, two are beyond ±7.7
  (+12.6, the masked bank, and -7.9, two stages, both at 0.05), where about one would be expected by chance.
- *Skew: open.* FAFI, clean, itself reaches 74.9, 75.3, 41.9 and 35.6 from 0.5 to 0.05; three partitions at 0.05 alone
  lie between 34.0 and 57.3.
- *Do the two losses conflict? Open.* Of 20 clients none has a mean cosine below 0; the lowest are small clients with
  hardly more than one class. Single layers and the released settings were not measured.
- *The ladder at 0.05.* Averaged weights are at chance level. For the same models, logits give 31, probabilities 38,
  with weights by class 60, margins 65. FAFI, released settings, reaches 53.3. *A model of the public samples alone*
  reaches 55.4: compare methods that use public samples with it. FedDF taught by margins reaches 56, by logits 29.
- *The ladder at 0.3.* RGA, margins of clients that train by cross-entropy, FAFI, released settings, CE + SupCon and
  FedETF are within ±7.7 of FAFI, clean (75.3), so their order is open. Ensembles of models trained by cross-entropy are
  10 to 23 points below it.
- *Heads on features that no client trains.* **All weights of these cells were rounded to bf16, including the heads**:
  the rows of AFL, FedCGS and FedPFT may be far too low, and their order says nothing.
- *ABHS: withdrawn.* Rows of the former ABHS are of a version whose shared blocks stayed as they were broadcast, so
  nobody learned anything in them. Its `abhs:theta=0` is today's `abhs:theta=0,epochs=0,student_epochs=0`.
- *FAFI, released settings, and FAFI, clean*: +17.7 at 0.05; -6.6 at 0.3, which is within ±7.7. They differ in ten
  options, of which one was also changed alone, BatchNorm by the statistics of the test batch: with the prototypes of
  owners it changes the score by -8.3 to -2.6 points at 0.05 and by -3.3 to +0.7 at 0.3, and makes an answer depend on
  the rest of the batch (on a client's own validation samples such models reach 42 to 45 at 0.3, others 74 to 78).
- *Fusion.* Prototypes of owners are above those of all in every row with running statistics, by 9 to 21 points. The
  order of the rules, and the effect of unit length and of weights by evidence, remain open. `iffi_code` equals
  `uniform`, as read in the code.
"""

DIGITS = """
## Digits, five partitions, two CPU cores

Written by hand from one command, which can be stopped and repeated, and the same with `--partition dirichlet:0.3`:

```
atoll compare fafi:epochs=15,profile=faithful fafi:epochs=15 fafi/margins:epochs=15 fedov:epochs=15 \\
  ensemble:epochs=15,of=probs ensemble:epochs=15,of=probs,weighting=classes fedetf:epochs=15 \\
  oneshot-margins:epochs=15 --task digits --partition dirichlet:0.05 --clients 5 --rounds 1 --central 0.25 \\
  --public 0.1 --split 80/10/10 --model mlp:64 --lr 0.05 --momentum 0.9 --clip 1 --batch-size 64 --seeds 5 --no-compile
```

Accuracy in % on the server's test set (a quarter of the 1,797 samples), mean ± standard deviation over seeds 0 to 4,
each with a partition of its own; differences are paired by seed, ± their 95 % t-interval. A perceptron with one hidden
layer of 64; no augmentation, so FAFI's two views are copies. One thread, commit e81e1e1. Nothing was tuned here.

| method, Dirichlet 0.05 | score | minus FAFI, released settings | minus FAFI, clean | minus margins of FAFI's clients |
| --- | ---: | ---: | ---: | ---: |
| ensemble of probabilities | 49.0 ± 9.1 | -2.4 ± 10.9 | -20.1 ± 3.5 | -22.4 ± 7.9 |
| FedETF | 51.3 ± 8.1 | -0.1 ± 7.4 | -17.8 ± 5.5 | -20.1 ± 7.8 |
| FAFI, released settings | 51.4 ± 11.2 |  | -17.7 ± 10.2 | -20.0 ± 11.4 |
| ensemble of probabilities, by class | 66.3 ± 8.9 | +14.9 ± 16.6 | -2.8 ± 13.3 | -5.1 ± 6.9 |
| margins | 68.6 ± 6.0 | +17.1 ± 11.1 | -0.5 ± 10.0 | -2.9 ± 6.7 |
| FAFI, clean | 69.1 ± 11.0 | +17.7 ± 10.2 |  | -2.3 ± 10.1 |
| FAFI's clients, answered by margins | 71.4 ± 4.7 | +20.0 ± 11.4 | +2.3 ± 10.1 |  |
| FedOV | 87.5 ± 4.8 | +36.1 ± 14.4 | +18.4 ± 10.5 | +16.1 ± 6.7 |

| method, Dirichlet 0.3 | score | minus FAFI, released settings | minus FAFI, clean | minus margins of FAFI's clients |
| --- | ---: | ---: | ---: | ---: |
| FAFI, released settings | 76.6 ± 10.6 |  | -12.2 ± 9.4 | -16.4 ± 10.0 |
| FedETF | 85.0 ± 5.1 | +8.4 ± 7.6 | -3.8 ± 5.1 | -8.0 ± 3.7 |
| ensemble of probabilities | 85.7 ± 4.2 | +9.1 ± 8.4 | -3.1 ± 5.2 | -7.3 ± 3.4 |
| FAFI, clean | 88.8 ± 4.7 | +12.2 ± 9.4 |  | -4.2 ± 3.8 |
| ensemble of probabilities, by class | 91.7 ± 2.7 | +15.1 ± 10.2 | +2.9 ± 3.5 | -1.3 ± 2.7 |
| margins | 91.9 ± 2.5 | +15.3 ± 11.8 | +3.1 ± 4.2 | -1.1 ± 2.1 |
| FedOV | 92.3 ± 1.4 | +15.7 ± 11.7 | +3.5 ± 4.3 | -0.7 ± 2.4 |
| FAFI's clients, answered by margins | 93.0 ± 2.9 | +16.4 ± 10.0 | +4.2 ± 3.8 |  |

**FedOV is 16.1 ± 6.7 above margins at 0.05**, on every one of the five partitions; at 0.3 the two, and the ensemble by
class, cannot be distinguished. FedOV's clients take as many epochs, but about eight times the work, and send less.
Margins are above FAFI, clean, at 0.3 by 4.2 ± 3.8, and at 0.05 by an interval that includes 0. Digits are small images
that a shuffled half makes unlike any digit: whether outliers do as much on natural images is what the study `rivals`
decides.
"""

SMALL_COMMENT = """
**What the tables show, and what they do not.** 6,000 of the 70,000 images: 3,500 for training, 600 public, 1,500 for
the test; LeNet, ten epochs; seeds 0 to 2, for the rivals 3 to 6. Two of the fifteen clients at Dirichlet 0.05 have a
single class. It is a rehearsal for the tables above: ten epochs on a few hundred samples are far from what FAFI is
designed for, and of the many differences here, one in twenty would exclude 0 by chance.

- *Margins and their rivals*, on partitions that played no part in finding the rule of margins (study `rivals`).
  FAFI's clients answered by margins are above FAFI, released settings, by 20.5 ± 26.3 at 0.05 and by 13.3 ± 10.7 at
  0.3; above FAFI, clean, by 20.3 ± 33.4 and 14.2 ± 15.6; above their best class-weighted rival, the ensemble of
  logits by class, by 12.2 ± 9.1 and 6.8 ± 8.9. One student of margins, with a fifth of the numbers, is 0.8 ± 2.7 and
  1.9 ± 3.3 below them. FedOV ran on two partitions, which decides nothing: its outliers overlap with SimCLR's views
  here ([why](../algorithms/fedov.md#outliers)).
- *Bank, skew, two stages: open.* At 0.05 every pool among the negatives is below FAFI on average, but only the image
  pool's interval excludes 0 (-12.5 ± 10.3); at 0.3 no pool's does. Two stages are +3.7 ± 9.5 and +5.5 ± 14.5.
- *Do the two losses conflict? Open.* Of the clients with two classes or more none has a cosine below 0.2. The two
  with a single class are at -0.03 with FAFI, and at -0.29 and -0.57 with the bank, which is then all that they can be
  contrasted with.
- *Answers of FAFI's clients*: margins are above fused features of the same clients by 23.1 ± 11.1 at 0.05 and by 30.6
  ± 22.7 at 0.3, above their own prototypes by 17.7 ± 18.1 and 8.9 ± 5.9. The rule was found on these clients'
  answers, with validation and test visible, so these tables flatter it. On CIFAR-10, which played no part in that,
  FAFI's clients gain 12.4 ± 1.6 and 14.2 ± 1.9 over FAFI, clean ([table](../algorithms/oneshot-margins.md#results));
  on digits they gain less ([table](#digits-five-partitions-two-cpu-cores)).
- *One model instead of five*: FedDF taught by margins reaches 55 and 65, by probabilities by class 35 and 53.
- *The ladder.* For the same models at 0.05 logits give 13, probabilities by class 45, margins 59, features
  standardised by public samples 61. **One client with a single class silences an ensemble of logits**: with seeds 0
  and 1 all answers are its class, including those of the students it teaches. Heads on features that no client trains
  reach 67 to 71 at both alphas, margins of FAFI's clients with a quarter of fused features 66 and 73.
- *Labels of public samples*: clients that classify them together with their own reach 78 (+36.5 ± 7.8 over FAFI,
  clean, at 0.05), prototypes refined with them 69. **FAFI without them has seen fewer labels**: this compares
  settings, not methods.
- *What is added to training, with fused features.* At 0.05 no addition without public labels is above FAFI by more
  than its interval, and `rarity=0.5` is below (-7.0 ± 6.0). At 0.3 balance is higher on average, only
  `prior=balanced` by more than its interval (+15.5 ± 14.6), as is `pool=anchored`, which needs public samples (+20.3
  ± 16.9).
- *Fusion.* Prototypes of owners are above those of all in every row on average, beyond the interval in two of twelve.
  Rules and weights by evidence cannot be told apart.
"""
