"""Federate Ditto on the bundled digits and see what each client gains over training alone."""

import numpy as np

from atoll import Task, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.local import Local
from atoll.data import datasets, partition


def main(clients: int = 20, rounds: int = 20) -> None:
    digits = datasets.load("digits")
    task = Task.build(digits, partition.parse("dirichlet:0.3"), clients=clients)

    alone = federate(task, Local(), rounds=rounds)
    ditto = federate(task, Ditto(lam=1.0), rounds=rounds)

    print("client  training samples  alone  ditto    gain")
    rows = zip(task.splits["train"].sizes(np.arange(clients)), alone.scores(), ditto.scores(), strict=True)
    for client, (samples, before, after) in enumerate(rows):
        print(f"{client:6}  {samples:16}  {before:5.3f}  {after:5.3f}  {after - before:+6.3f}")
    print(f"mean    {'':16}  {alone.scores().mean():5.3f}  {ditto.scores().mean():5.3f}")
    print(f"each client sent {ditto.ledger.bytes('up') / clients / 1e6:.1f} MB in {rounds} rounds")


if __name__ == "__main__":
    main()
