"""Golden runs: `python tests/golden` compares, `--write [PART OF A NAME]` accepts, `--compare A B` shows two files.

`--api` writes down the public names with their types.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden.api import API, describe_api
from golden.cases import list_cases, play
from golden.digests import digest_machine, digest_run, find_differences
from golden.files import GOLDEN, read_golden, write_golden


def main() -> int:
    """Compare or write; return 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python tests/golden", description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="only runs whose names have this in them")
    parser.add_argument("--write", action="store_true", help="accept what the runs leave now")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="compare two files, run nothing")
    parser.add_argument("--file", type=Path, default=GOLDEN, help="where digests are kept")
    parser.add_argument("--times", action="store_true", help="print how long each run takes")
    parser.add_argument("--api", action="store_true", help="accept the public names and their types")
    asked = parser.parse_args()
    if asked.api:
        API.write_text(describe_api(), encoding="utf-8")
        return 0
    if asked.compare:
        before, after = map(read_golden, asked.compare)
        return show(before, after, exact=before["machine"] == after["machine"])
    known = read_golden(asked.file) if asked.file.exists() else {"machine": digest_machine(), "runs": {}}
    cases = {name: case for name, case in list_cases().items() if asked.part in name}
    runs = {}
    for name, case in cases.items():
        began = time.process_time()
        runs[name] = digest_run(play(case))
        if asked.times:
            print(f"{time.process_time() - began:6.2f} s  {name}")
    now = {"machine": digest_machine(), "runs": runs}
    others = {name: known["runs"][name] for name in list_cases() if asked.part not in name and name in known["runs"]}
    before = {**known, "runs": {name: run for name, run in known["runs"].items() if asked.part in name}}
    exact = known["machine"] == now["machine"]
    if not asked.write:
        return show(before, now, exact=exact)
    show(before, now, exact=exact)
    if others and not exact:
        print("These digests are from a machine that rounds otherwise: write all of them, without a name.")
        return 1
    write_golden(asked.file, {**now, "runs": {**others, **runs}})
    return 0


def show(before: dict, after: dict, *, exact: bool) -> int:
    """Print the runs that differ and their parts; return whether there are any."""
    names = [*dict.fromkeys([*before["runs"], *after["runs"]])]
    found = 0
    for name in names:
        if name not in before["runs"] or name not in after["runs"]:
            print(f"{name}: only {'after' if name in after['runs'] else 'before'}")
            found += 1
        elif parts := find_differences(before["runs"][name], after["runs"][name], exact=exact):
            print(f"{name}: {', '.join(parts)}")
            found += 1
    how = "in all bits" if exact else "to rounding: the machines round otherwise"
    print(f"{len(names) - found} of {len(names)} runs are the same {how}.")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
