"""Your own data and your own network: four hospitals, each with its own patients and its own scanner."""

import torch
from torch import nn

from atoll import Task, Training, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.local import Local


def hospital(number: int, patients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic patients: the same disease everywhere, but each scanner shifts its measurements."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(patients, 8, generator=generator)
    ill = (x[:, 0] - x[:, 1] + 0.5 * x[:, 2] > 0).long()
    return x + torch.randn(8, generator=generator), ill


def main(rounds: int = 30) -> None:
    sizes = {"Ulm": 400, "Porto": 120, "Lund": 60, "Graz": 30}
    data = {name: hospital(number, patients) for number, (name, patients) in enumerate(sizes.items())}
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))  # the last linear layer is the head
    task = Task.own(data, model=model, training=Training(lr=0.1, batch_size=16))

    reports = {type(method).__name__: federate(task, method, rounds=rounds) for method in methods()}
    print("         ", *(f"{task.client_name(client):>7}" for client in range(task.clients)))
    for name, report in reports.items():
        print(f"{name:9}", *(f"{score:7.3f}" for score in report.scores()))


def methods() -> list[Local | FedAvg | FedPer]:
    return [Local(), FedAvg(), FedPer()]


if __name__ == "__main__":
    main()
