"""A frame with patients of three hospitals, methods with hyperparameters, settings and figures: all of it has types."""

import polars as pl

from atoll import Report, Settings, Task, compare, federate
from atoll.algorithms import Ditto, Ensemble, FedPer, Local
from atoll.kernel.randomness import generator


def invent(hospital: str, patients: int, sign: int) -> pl.DataFrame:
    """Make patients up: age and glucose decide who comes back; glucose not alike everywhere."""
    draw = generator(0, "invented patients", hospital)
    age, glucose = draw.normal(60, 15, patients), draw.normal(100, 20, patients)
    back = (age - 60) / 15 + sign * (glucose - 100) / 20 + draw.logistic(0, 0.5, patients) > 0
    return pl.DataFrame({"age": age, "glucose": glucose, "back": back}).with_columns(hospital=pl.lit(hospital))


def main(rounds: int = 30) -> None:
    frame = pl.concat([invent("Ulm", 300, 1), invent("Porto", 120, -1), invent("Lund", 60, 1)])
    task = Task.own(frame, client="hospital", target="back", kind="classification")
    settings = Settings(rounds=rounds, metric="auroc")

    alone = federate(task, Local(epochs=2), settings=settings)
    ditto = federate(task, Ditto(lam=0.5, epochs=2), settings=settings)
    once: Report = federate(task, Ensemble(epochs=2 * rounds), rounds=1, metric="auroc")
    for client, gain in enumerate(ditto.scores() - alone.scores()):
        print(f"{task.client_name(client):6} gains {gain:+.3f} {ditto.metric.name}")
    for name, report in {f"{rounds} rounds": ditto, "one upload": once}.items():
        print(f"{name}: {report.summary()['macro']:.3f} for {report.megabytes('up'):.2f} MB")

    comparison = compare(task, [FedPer(private="head"), "fedprox:mu=0.1"], seeds=2, rounds=rounds)
    print("best on validation samples:", comparison.best)


if __name__ == "__main__":
    main()
