"""From files to a report in five lines: three hospitals, invented ones, with a CSV file of patients each."""

import csv
import tempfile
from pathlib import Path

import rich

from atoll import Task, compare
from atoll.kernel.randomness import generator

HOSPITALS = {"Ulm": (300, 1), "Porto": (120, -1), "Lund": (30, 1)}  # patients, and the sign of the effect of glucose


def invent(folder: Path) -> None:
    """Write a file per hospital. Age, smoking and glucose decide who comes back; glucose not alike everywhere."""
    for name, (patients, sign) in HOSPITALS.items():
        draw = generator(0, "invented patients", name)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["age", "glucose", "sex", "smoker", "readmitted"])
            for _ in range(patients):
                age, glucose = draw.normal(60, 15), draw.normal(100, 20)
                sex, smoker = draw.choice(["F", "M"]), bool(draw.random() < 0.3)
                risk = (age - 60) / 15 + sign * (glucose - 100) / 20 + smoker + draw.logistic(0, 0.5)
                rows.writerow([round(age), round(glucose, 1), sex, smoker, "yes" if risk > 0.3 else "no"])


def main(rounds: int = 20, seeds: int = 3, out: str = "report") -> None:
    with tempfile.TemporaryDirectory() as folder:
        invent(Path(folder))
        task = Task.own(folder, target="readmitted", name="hospitals")
    comparison = compare(task, ["local", "fedavg", "ditto"], seeds=seeds, rounds=rounds)
    rich.print(comparison.table())
    comparison.save(out)


if __name__ == "__main__":
    main()
