"""How long a run waits for its files: seconds in which the loop stands still, per round, and how much is written.

    python benchmarks/checkpoints.py                        100 clients keep 220 MB, all train in every round
    python benchmarks/checkpoints.py --cohort 10            a tenth of them trains
    python benchmarks/checkpoints.py --device cuda

The run is Local on small data, with a checkpoint after every third round. The last row of the table is the wait at the
end, when everything must be on disk.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

import torch

from atoll import LocalEngine, Task, Training, federate
from atoll.federation.session import Session
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP

CLIENTS, SAMPLES, FEATURES, HIDDEN = 100, 30, 64, (700, 700)


def make_task() -> Task:
    draw = generator(0, "data")
    data = {
        str(k): (
            torch.from_numpy(draw.normal(size=(SAMPLES, FEATURES))).float(),
            torch.from_numpy(draw.integers(10, size=SAMPLES)),
        )
        for k in range(CLIENTS)
    }
    with default_generator(0):
        model = MLP((FEATURES,), 10, hidden=HIDDEN)
    return Task.of_clients(data, model, classes=10, training=Training(batch_size=10), shares=(0.6, 0.2, 0.2))


class Waits:
    """Measures the time that a run spends in `Session.record` and `Session.__exit__`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        for name in ("record", "__exit__"):
            self.time(name)

    def time(self, name: str) -> None:
        original = getattr(Session, name)

        def timed(*given, **more):
            began = time.perf_counter()
            try:
                return original(*given, **more)
            finally:
                self.seconds.append(time.perf_counter() - began)

        setattr(Session, name, timed)


def written_bytes() -> int:
    """Bytes that this process has asked the system to write so far; 0 where nobody counts."""
    path = Path("/proc/self/io")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--every", type=int, default=3, help="rounds between evaluations, which checkpoints follow")
    parser.add_argument("--cohort", type=int, help="clients a round; all by default")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    task, waits = make_task(), Waits()
    engine = LocalEngine(device=options.device, strategy="whole", compile=False)
    asked = {"eval_every": options.every, "cohort": options.cohort}
    asked = {name: value for name, value in asked.items() if value is not None}
    federate(task, "local", rounds=2, engine=engine, **asked)  # so the first round costs no more than others
    with tempfile.TemporaryDirectory() as home:
        waits.seconds.clear()
        before, began = written_bytes(), time.perf_counter()
        federate(task, "local", rounds=options.rounds, engine=engine, folder=Path(home, "run"), **asked)
        took, written = time.perf_counter() - began, written_bytes() - before
        held = sum(path.stat().st_size for path in Path(home, "run", "checkpoints").iterdir())
    *rounds, end = waits.seconds
    print(f"{'all':24}{took:8.2f} s")
    print(f"{'waited per round, mean':24}{sum(waits.seconds) / options.rounds:8.3f} s")
    print(f"{'waited, longest':24}{max(rounds):8.3f} s")
    print(f"{'waited at the end':24}{end:8.3f} s")
    print(f"{'written':24}{written / 1e6:8.0f} MB, {held / 1e6:.0f} MB of it are there at the end")


if __name__ == "__main__":
    main()
