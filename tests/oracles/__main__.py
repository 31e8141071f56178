"""Print the largest relative difference between Atoll and every oracle: `python tests/oracles [PART OF A NAME]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracles.tools import CASES, load_oracles


def main(wanted: str = "") -> None:
    """Print a table of the oracles whose names have `wanted` in them."""
    chosen = {name: one for name, one in load_oracles().items() if wanted in name}
    width = max(map(len, chosen), default=0)
    print(f"{'method':{width}}", *(f"{case:>10}" for case in CASES))
    for name, one in chosen.items():
        found = [f"{one.compare(case):10.1e}" if case in one.cases else f"{'–':>10}" for case in CASES]
        print(f"{name:{width}}", *found)


if __name__ == "__main__":
    main(*sys.argv[1:])
