"""The CIFAR-10 workload of the pfl-research benchmarks by itself, with other sizes; see `atoll.testing.bench.pfl`.

python benchmarks/pfl_cifar10.py --device cuda --precision bf16
"""

import argparse
import logging
from pathlib import Path

import torch

from atoll.testing.bench.pfl import PflCifar10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    workload = PflCifar10(options.rounds, options.clients, options.precision, None, options.data)
    row = workload.measure(options.device)
    print(f"calibration and compilation: {row.first:.1f} s; plan: {row.plan}")
    print(
        f"{options.rounds} rounds in {row.atoll:.1f} s, {1e3 * row.atoll / options.rounds:.2f} ms a round; {row.note}"
    )


if __name__ == "__main__":
    main()
