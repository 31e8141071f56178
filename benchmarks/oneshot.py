"""One shot on one protocol: the corrected table, the ladder, the study of fusion, and the speed of an epoch.

    python benchmarks/oneshot.py --small --engine 'loop traced one_core' --jobs 2     # Fashion-MNIST, two cores
    python benchmarks/oneshot.py --device cuda --precision bf16 --engine 'loop compiled graph channels_last'
        --together --minutes 9 --only 'corrected-a0.05'                       # in one line
    python benchmarks/oneshot.py --study rivals        # or noise, walk, arms, skew, ablation: what decides a question
    python benchmarks/oneshot.py --study notes         # the notes' own table: `oneshot_notes.py` has its protocol
    python benchmarks/oneshot.py --study walk --tiny --out out --runs runs/tiny    # a rehearsal of minutes
    python benchmarks/oneshot.py --list
    python benchmarks/oneshot.py --page                                       # the page from what is there

**Protocol.** CIFAR-10, ResNet-18, 5 clients. A tenth of the training images is public, taken before the rest is dealt,
for all methods, also those that use none. The rest is dealt by `dirichlet:ALPHA`: disjoint, at least 10 samples each,
drawn again otherwise (`fafi-disjoint` may leave a client without any). A seed decides partition, initial model and
draws, so that all methods of a seed have the same clients. Clients train on 95 % of their samples; the other 5 %,
pooled, are for choices. The score is that of what everybody deploys, on the official test set, after the last epoch.

**Cells in order.** Every cell is a one-shot run of its own; one with more epochs goes on where a shorter one of the
same training ended, so that all points of an arm cost as much as the last (not of `fafi-two-stage`, whose first stage
is a share of all epochs). Shorter ones must come first, as they are listed: a longer one cannot go back.

**Budget**, on an H200 in bf16, to plan by: figures are rough, and not results, because most were read while other
processes used the GPU. 42,750 training images, in two views, take 1.3 s an epoch, compiled; without compiling 4.8 s, so
compiling pays from 25 epochs on.

    to start             15 s a process (data, CUDA), 60 to 90 s to compile the steps of a family, two or three times as
                         long where ten processes share the cores
    speed                15 s to 80 s a plan, and the compiler
    corrected            an arm: 47 s for 36 epochs, 2 s a point; image pool 50 s; two-stage 90 s (69 epochs);
                         7 arms at one alpha and seed 7 min, at 4 alphas 27 min, 3 seeds 80 min
    conflict             11 epochs of two gradients each: 29 s, 2 arms: 1 min an alpha
    ladder               cross-entropy 24 s (one view), shared by 12 servers of 2 to 5 s, students (FedDF) 20 s each;
                         a fixed frame 24 s, shared by 3; abhs, abhs-local 45 s each, with their students; ce-supcon,
                         fafi with released settings 47 s each; heads on features of nobody's training 3 s each: 7 min
                         an alpha
    candidates           15 trainings of 11 epochs, 15 s each, and 6 answers of 3 s each: 8 min; those that are best on
                         validation then for 36
    fusion               servers of FAFI's training, 3 s each: 2.5 min an alpha

Of the studies nothing has been run on a GPU; by the figures above, 36 epochs of FAFI being 47 s:

    noise                36 trainings of FAFI: 28 min; with --only 'noise-.*a0.05' 7 min
    walk                 a seed: 13 trainings and 7 answers of their clients, 11 min
    arms                 an alpha and seed: 7 arms and 4 more of two stages, 13 min
    ablation             an alpha and seed: one training of FAFI, 12 answers: 1.5 min
    rivals               an alpha and seed: FAFI twice, cross-entropy, a frame, FedOV twice (about eight times the
                         passes of cross-entropy: 3 min each): 10 min

Spell the plan out, `--engine 'loop compiled graph channels_last'`, so that nothing is measured in every cell. Several
calls side by side (under NVIDIA's multi-process service, each `--together`, with an --out and --runs of its own) share
the GPU, and one compiles while others train; their seconds are then not to be published. A process of that service must
not be killed while it computes: all others end with it.

**Noise.** Eight repeats of one cell on the H200 have a standard deviation of 2.8 points: the difference of two single
cells is uncertain by ±7.7 (95 %). On a CPU a cell is the same every time.

Memory: one client at a time, two views of 512 in bf16, about 5 GB. Disk: half a gigabyte for each point of training,
until the last cell of its family is done.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from oneshot_cells import FULL, SMALL, STUDIES, TINY, speeds
from oneshot_notes import main as run_notes
from oneshot_page import page
from published import Cell, main, origin, run

REPEATS = 3  # of which the median counts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, products of matrices are not deterministic


def speed(cell: Cell, data: str | None, device: str) -> dict[str, Any]:
    """Seconds of a whole run of one epoch, evaluation included, after one that made the programs."""
    from atoll import LocalEngine, Recipe, Settings, Training, federate
    from atoll.compose import create

    _, precision, *words = cell.task.split("-")
    plan = " ".join(["loop", *words, "graph"])
    engine = LocalEngine(device=device, precision=precision, strategy=plan)  # type: ignore[arg-type]
    recipe = Recipe(**cell.recipe, data=data, seed=cell.seed, training=Training(**cell.training))
    task, seconds = engine.place(recipe.build()), list[float]()
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        report = federate(task, create(cell.method), settings=Settings(**cell.settings, seed=cell.seed), engine=engine)
        seconds.append(round(time.perf_counter() - began, 2))  # the score was read, so the device is done
    (line,) = report.history
    return {
        "curve": [{"round": 1, "central": round(100 * line["evaluation"]["central"]["score"], 3)}],
        "seconds": statistics.median(seconds[1:]),
        "first": seconds[0],
        "each": seconds[1:],
        "images": int(task.splits["train"].offsets[-1]),
        "plans": [str(plan) for plan in engine.plans.values()],
        "memory": line["memory"],
        **origin(precision),
    }


def one(cell: Cell, folder: Path, data: str | None, engine: Any) -> dict[str, Any]:
    """A cell of any kind."""
    import torch

    from atoll import LocalEngine

    if cell.task.startswith("speed"):
        return speed(cell, data, engine.options["device"])
    deterministic = "deterministic-kernels" in cell.task
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    if deterministic:  # programs of other cells were made without
        engine = LocalEngine(**engine.options)
    return run(cell, folder, data, engine)


if __name__ == "__main__":
    if sys.argv[1:3] == ["--study", "notes"]:
        raise SystemExit(run_notes(sys.argv[3:]))
    main(
        "oneshot", [*speeds(), *FULL.cells()], {"oneshot": page},
        small=SMALL.cells(), tiny=TINY.cells(), studies=STUDIES, runner=one,
    )  # fmt: skip
