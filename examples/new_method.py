"""A method in its own file: each client deploys a mixture of the shared model and of its own.

Try `atoll check examples/new_method.py`: the conformance battery runs on it as on the methods of the package.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll import Algorithm, Cohort, Params, Stack, Task, Update, federate
from atoll.data import datasets, partition
from atoll.kernel.algorithm import Epochs, Limits, Share
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Blend(Algorithm):
    """v_k is trained alone, w by federated averaging; deployed is (1 - share) w + share v_k."""

    share: Share = 0.5
    epochs: Epochs = 1

    limits: ClassVar[Limits] = {"fedavg": {"share": 0.0}, "local": {"share": 1.0}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        v = sgd(cohort, start=cohort.recall(default=cohort.initial), epochs=self.epochs)
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.samples, keep=v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        return cohort.stacked(w).lerp(cohort.recall(default=cohort.initial), self.share)


if __name__ == "__main__":
    task = Task.build(datasets.load("digits"), partition.parse("dirichlet:0.3"), clients=10)
    for share in (0.0, 0.5, 1.0):
        print(f"share {share}: {federate(task, Blend(share=share), rounds=10).summary()['macro']:.3f}")
