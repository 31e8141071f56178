"""Half of the clients are asked in each round, some drop out, and two are never reached."""

import numpy as np

from atoll import Task, federate
from atoll.algorithms.ditto import Ditto
from atoll.data import datasets, partition

UNREACHABLE = (3, 7)


def faults(round: int, clients: np.ndarray) -> np.ndarray:  # noqa: ARG001
    """Which clients of a cohort are lost in this round."""
    return np.isin(clients, UNREACHABLE)


def main(clients: int = 12, rounds: int = 8) -> None:
    task = Task.build(datasets.load("digits"), partition.parse("dirichlet:0.5"), clients=clients)
    report = federate(task, Ditto(), rounds=rounds, cohort=0.5, drop=0.1, faults=faults)
    for line in report.history:
        print(f"round {line['round']:2}: asked {line['asked']}, replied {line['replied']}, lost {line['lost']}")

    scores = report.scores()  # all clients are evaluated, those that never took part with the shared model
    print(f"all {clients} clients: {scores.mean():.3f}; never reached: {scores[list(UNREACHABLE)].round(3)}")


if __name__ == "__main__":
    main()
