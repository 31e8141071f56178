"""The same numbers on a GPU: every method, on the CPU and on the GPU, in every grouping and mode.

    python benchmarks/device_check.py --device cuda
    python benchmarks/device_check.py --only '^fed(df|gen)$'
    python benchmarks/device_check.py --methods fml:meme=linear fedavg+sam:part=norm

Digits, 10 clients, 3 rounds (one-shot methods: 1), float64; the model has dropout and BatchNorm. Shown is the largest
difference of any parameter from the CPU's whole cohort, or why a method does not run so. The last line repeats a run
whose model draws from torch's own generator.
"""

import argparse

import torch
import torch.nn.functional as F
from published import choose
from torch import Tensor, nn

from atoll import Algorithm, LocalEngine, Report, Task, federate
from atoll.algorithms import list_methods
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.data.datasets import load
from atoll.data.partition import Dirichlet, Iid
from atoll.kernel.errors import AtollError, first_line
from atoll.runtime.engines import planning
from atoll.testing.conformance import personal_models


class Net(nn.Module):
    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.head, self.functional = nn.Linear(4 * 36, 10), functional

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return F.dropout(x, 0.2, self.training) if self.functional else self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def models_after(task: Task, method: Algorithm, **options: object) -> list[dict[str, Tensor]]:
    engine = LocalEngine(dtype=torch.float64, **options)
    rounds = 1 if method.one_shot else 3
    report: Report = federate(task, method, rounds=rounds, seed=1, evaluation="none", engine=engine)
    return [{name: leaf.cpu() for name, leaf in model.items()} for model in personal_models(report)]


def difference(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> float:
    pairs = [(a[name], b[name]) for a, b in zip(some, others, strict=True) for name in a]
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs=1, help="a regular expression that names of methods must match")
    parser.add_argument("--methods", nargs="*", help="these, with their values")
    asked = parser.parse_args()
    device = asked.device
    planning.WORTH_MEASURING = 0.0  # so that traced programs and CUDA graphs are among what is measured
    task = Task.build(load("digits"), Dirichlet(0.5), clients=10, model=Net, public=0.1)
    for name in asked.methods or choose(parser, list_methods(), asked.only):
        method = create(name)
        try:
            reference = models_after(task, method, device="cpu", strategy="whole")
        except AtollError as error:
            print(name, first_line(error), flush=True)
            continue
        row = {
            "whole": models_after(task, method, device=device, strategy="whole"),
            "chunk:4": models_after(task, method, device=device, strategy="chunk:4"),
            "loop": models_after(task, method, device=device, strategy="loop"),
        }
        print(name, *(f"{key} {difference(reference, value):.1e}" for key, value in row.items()), flush=True)
    equal = Task.build(load("digits"), Iid(), clients=10, model=Net)  # one size of cohort: one program to compile
    reference = models_after(equal, FedAvg(), device="cpu", strategy="whole")
    compiled = models_after(equal, FedAvg(), device=device, strategy="whole", compile=True)
    print("fedavg, clients of equal size", f"compiled {difference(reference, compiled):.1e}", flush=True)
    drawing = Task.build(load("digits"), Dirichlet(0.5), clients=10, model=lambda: Net(functional=True))
    twice = [models_after(drawing, FedAvg(), device=device) for _ in range(2)]
    print("functional dropout, two runs:", difference(*twice))


if __name__ == "__main__":
    main()
