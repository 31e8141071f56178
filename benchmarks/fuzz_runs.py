"""What commands say to damaged run folders: mutations of five folders, each read by every command that reads folders.

    python benchmarks/fuzz_runs.py --mutations 400

The folders are a finished run with a memory on disk, one that was stopped, one that was stopped and whose checkpoints
list several files of what few clients kept in RAM, a one-shot run and a comparison. A mutation
damages one file or folder of a copy: bytes, JSON values, lines, kinds of files, versions; some are sealed again, some
happen to a run without checkpoints. Each outcome is one of

    same       as if nothing had happened (the command does not need the file, or makes it again)
    refused    an error that begins with `error:`, and nothing shown
    said       something else is shown, and a sentence says that the run is incomplete, left out or damaged
    SILENT     something else is shown, and nobody says so
    TRACEBACK  an error that nobody thought of
    HANG       no answer in a minute

The last three must not happen; the exit code says whether they did.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from atoll import LocalEngine, Recipe, federate
from atoll.cli import app
from atoll.compose import create
from atoll.experiments.comparison import compare
from atoll.kernel.randomness import generator
from atoll.records.files import _seal_of

BAD = ("SILENT", "TRACEBACK", "HANG")
WORDS = ("incomplete", "left out", "is not there", "damaged", "cannot be read", "begins again", "trained again")
FEWER = r"\b[0-3]/[2-4]\b"  # rounds in the list of runs
SECONDS = 60
SMALL = {"clients": 4, "samples": 160, "model": "mlp:8"}
Draw = np.random.Generator


class Hang(BaseException):
    """A command took too long."""


class Case(NamedTuple):
    """One command on one damaged folder."""

    number: int
    base: str
    mutation: str
    command: str
    outcome: str
    message: str


# -- the folders -------------------------------------------------------------------------------------------------------


def make_folders(home: Path) -> None:
    """Make the five folders that are damaged later."""

    def stop(line: Any) -> None:
        if line.round == 3:
            raise KeyboardInterrupt

    engine = LocalEngine(device="cpu", strategy="whole", compile=False)
    task = Recipe(**SMALL).build()
    federate(task, "ditto", rounds=2, eval_every=1, memory="disk", folder=home / "finished", engine=engine)
    with contextlib.suppress(KeyboardInterrupt):
        federate(
            task, "scaffold", rounds=4, eval_every=2, memory="disk", folder=home / "stopped", engine=engine,
            on_round=stop,
        )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):
        federate(task, "ditto", rounds=4, eval_every=1, cohort=1, folder=home / "few", engine=engine, on_round=stop)
    federate(task, create("oneshot-avg:epochs=1"), rounds=1, folder=home / "shot", engine=engine)
    compare(Recipe(**SMALL), ["ditto"], seeds=1, rounds=1, folder=home / "comparison", engine=engine)


def commands_of(base: str) -> dict[str, list[str]]:
    """The commands that read a folder."""
    here = f"runs/{base}"
    return {
        "list": ["list", "runs"], "report": ["report", here], "explain": ["explain", here], "resume": ["resume", here]
    }  # fmt: skip


# -- mutations ---------------------------------------------------------------------------------------------------------


def mutate(folder: Path, draw: Draw) -> str:
    """Damage something in a folder; return what, in words."""
    without = ""
    if draw.random() < 0.15:
        for place in folder.rglob("checkpoints"):
            shutil.rmtree(place)
        without = "without checkpoints, "
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".log", ".lock", ".html")
    )
    files = [path for path in files if path.name != ".lock" and path.suffix not in (".csv", ".md", ".tex")]
    path = files[draw.integers(len(files))]
    kinds: list[Callable[[Path, Draw], str]] = [damage_bytes, damage_kind]
    if path.suffix == ".json":
        kinds = [damage_bytes, damage_kind, damage_json, damage_json, damage_json]
    elif path.suffix == ".jsonl":
        kinds = [damage_bytes, damage_kind, damage_lines, damage_lines, damage_line]
    name = path.relative_to(folder).as_posix()
    return f"{without}{name}: {kinds[draw.integers(len(kinds))](path, draw)}"


def damage_bytes(path: Path, draw: Draw) -> str:
    """Change the bytes of a file."""
    data = path.read_bytes()
    place = int(draw.integers(max(1, len(data))))
    changed = {
        "empty": b"",
        "cut": data[:place],
        "one byte flipped": data[:place] + bytes([byte ^ 4 for byte in data[place : place + 1]]) + data[place + 1 :],
        "zeros at the end": data[:place] + bytes(len(data) - place),
        "garbage": draw.bytes(200),
        "garbage inside": data[:place] + draw.bytes(20) + data[place:],
        "twice": data + data,
        "garbage after": data + b"\xff\xfe garbage\n",
    }  # fmt: skip
    how = [*changed][draw.integers(len(changed))]
    path.write_bytes(changed[how])
    return how


def damage_kind(path: Path, draw: Draw) -> str:
    """Put something else in the place of a file."""
    data = path.read_bytes()
    path.unlink()
    how = [
        "gone",
        "a folder",
        "a link to a copy",
        "a link to nothing",
        "a pipe",
        "1 TiB",
        "nobody may read it",
        "a link to itself",
    ]
    kind = how[draw.integers(len(how))]
    match kind:
        case "a folder":
            path.mkdir()
        case "a link to a copy":
            copy = path.parent / f"copy-of-{path.name}.bak"
            copy.write_bytes(data)
            path.symlink_to(copy)
        case "a link to nothing":
            path.symlink_to(path.parent / "nothing")
        case "a link to itself":
            path.symlink_to(path.name)
        case "a pipe":
            os.mkfifo(path)
        case "1 TiB":
            with path.open("wb") as file:
                file.truncate(2**40)
        case "nobody may read it":
            path.write_bytes(data)
            path.chmod(0)
    return kind


VALUES: list[Any] = [
    None, True, "x", "", -1, 0, 1.5, 10**30, float("nan"), float("inf"), [], {}, [[]], {"a": 1}, 999, "1", [1, "x"],
]  # fmt: skip


def damage_json(path: Path, draw: Draw) -> str:
    """Change a value, a name or the version of a JSON file; half of the time it is sealed again."""
    content = json.loads(path.read_text())
    if draw.random() < 0.1:
        path.write_text("[" * 100_000)
        return "nested deeply"
    if draw.random() < 0.1:
        content["schema"] = [2, 999, "1", -1, None, 1.5][draw.integers(6)]
        words = f"schema {content['schema']!r}"
    else:
        words = damage_value(content, draw)
    if draw.random() < 0.5 and "seal" in content:
        content.pop("seal")
        content["seal"] = _seal_of(content)
        words += ", sealed again"
    path.write_text(json.dumps(content))
    return words


def damage_value(content: Any, draw: Draw) -> str:
    """Change one value somewhere inside."""
    inside, where = content, ""
    while True:
        keys = [*inside] if isinstance(inside, dict) else [*range(len(inside))]
        if not keys:
            return "nothing"
        key = keys[draw.integers(len(keys))]
        where += f".{key}"
        if not isinstance(inside[key], dict | list) or not inside[key] or draw.random() < 0.2:
            break
        inside = inside[key]
    how = ["value", "value", "gone", "other number", "new name"][draw.integers(5)]
    if how == "gone":
        del inside[key]
    elif how == "new name" and isinstance(inside, dict):
        inside[f"{key}x"] = inside.pop(key)
    elif how == "other number" and isinstance(inside[key], int | float):
        inside[key] = inside[key] + 1
    else:
        value = VALUES[draw.integers(len(VALUES))]
        inside[key] = value
        how = repr(value)
    return f"{where[1:]} {how}"


def damage_lines(path: Path, draw: Draw) -> str:
    """Lose, repeat, swap or cut lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        path.write_text("{}\n")
        return "an empty line"
    place = int(draw.integers(len(lines)))
    ways = {
        "lost": lines[:place] + lines[place + 1 :],
        "repeated": [*lines, lines[place]],
        "the other way round": lines[::-1],
        "last one cut": [*lines[:-1], lines[-1][: len(lines[-1]) // 2]],
        "no line": [*lines[:place], b"no line\n", *lines[place:]],
        "a list": [*lines, b"[1, 2]\n"],
        "an empty line": [*lines[:place], b"\n", *lines[place:]],
    }
    how = [*ways][draw.integers(len(ways))]
    path.write_bytes(b"".join(ways[how]))
    return f"line {place} {how}"


def damage_line(path: Path, draw: Draw) -> str:
    """Change a value in a line."""
    lines = path.read_text().splitlines()
    if not lines:
        return damage_lines(path, draw)
    place = int(draw.integers(len(lines)))
    content = json.loads(lines[place])
    words = damage_value(content, draw)
    lines[place] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"line {place}, {words}"


# -- commands ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a command said, and what its folder holds afterwards."""

    code: int
    error: BaseException | None
    out: str
    told: str
    state: Any


def ask(arguments: list[str], *, changes: bool) -> Answer:
    """Run a command in this process; of one that changes a folder, what is there afterwards counts."""
    with alarm():
        try:
            result = CliRunner().invoke(app, arguments)
        finally:
            signal.alarm(0)
    error = result.exception if not isinstance(result.exception, SystemExit) else None
    if isinstance(error, Hang):
        raise error
    state = None
    if changes and result.exit_code == 0:
        state = {path.parent.as_posix(): numbers_of(path.parent) for path in sorted(Path("runs").rglob("config.json"))}
    return Answer(result.exit_code, error, "" if changes else result.stdout, result.stderr + result.stdout, state)


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def numbers_of(folder: Path) -> Any:
    """All numbers of a run that do not depend on the clock."""
    lines = []
    for text in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, AttributeError):  # garbage at the end is left out by commands, too
            lines.append({name: value for name, value in json.loads(text).items() if name not in ("seconds", "memory")})
    last = max((folder / "checkpoints").glob("round-*.safetensors"))
    with np.load(folder / "outcomes.npz") as arrays:
        outcomes = arrays["test"].tolist()
    files = [last, *sorted(folder.glob("checkpoints/kept-*.safetensors"))]  # which hold more: the engine's plans
    tensors = [{name: value.tolist() for name, value in load_file(file).items()} for file in files]
    return json.dumps(lines), (folder / "ledger.jsonl").read_bytes(), last.name, json.dumps(tensors), outcomes


def judge(answer: Answer, expected: Answer) -> tuple[str, str]:
    """Say what kind of answer that is, and its first line."""
    lines = [line for line in answer.told.strip().splitlines() if line] or [""]
    first = next((line for line in lines if line.startswith("error:")), lines[0])
    if answer.error is not None or "Traceback" in answer.told:
        return "TRACEBACK", repr(answer.error)
    if answer.code:
        return ("refused" if "error:" in answer.told else "SILENT"), first
    if (answer.code, answer.out, answer.state) == (expected.code, expected.out, expected.state):
        return "same", ""
    said = next((line for line in lines if any(word in line for word in WORDS)), None)
    if said is None and re.findall(FEWER, answer.out) != re.findall(FEWER, expected.out):
        said = "fewer rounds are listed"
    if said is not None and answer.state is None:  # numbers that are made again must be the same
        return "said", said
    return "SILENT", first


def fuzz(mutations: int, seed: int, home: Path, *, every: bool = True) -> list[Case]:
    """Damage copies of the folders; with `every`, all commands read each of them, else one in turn."""
    folders, work = home / "folders", home / "work"
    make_folders(folders)
    bases = sorted(path.name for path in folders.iterdir())
    before = Path.cwd()
    found = []
    try:
        expected = {}
        for base in bases:
            for name, arguments in commands_of(base).items():
                lay_out(folders / base, work)
                expected[base, name] = ask(arguments, changes=name == "resume")
                assert expected[base, name].code == 0, expected[base, name].told
        for number in range(mutations):
            base = bases[number % len(bases)]
            names = [*commands_of(base)]
            for name in names if every else [names[number // len(bases) % len(names)]]:
                here = lay_out(folders / base, work)
                mutation = mutate(here, generator(seed, "fuzz", number))
                try:
                    outcome, message = judge(
                        ask(commands_of(base)[name], changes=name == "resume"), expected[base, name]
                    )
                except Hang:
                    outcome, message = "HANG", ""
                found.append(Case(number, base, mutation, name, outcome, message))
    finally:
        os.chdir(before)
        _remove(work)
    return found


def lay_out(folder: Path, work: Path) -> Path:
    """Make a fresh copy of a folder, as the only run of a working folder."""
    os.chdir(work.parent)
    _remove(work)
    here = work / "runs" / folder.name
    shutil.copytree(folder, here)
    os.chdir(work)
    return here


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="every case")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("ATOLL_STATE", f"{home}/state")
        found = fuzz(options.mutations, options.seed, Path(home))
    for case in found:
        if options.show or case.outcome in BAD:
            print(f"{case.outcome:9} {case.number:3} {case.command:7} {case.base}/{case.mutation}: {case.message}")
    counted = Counter((case.command, case.outcome) for case in found)
    kinds = ["same", "refused", "said", *BAD]
    print(f"{'command':10}" + "".join(f"{kind:>11}" for kind in kinds))
    for command in dict.fromkeys(case.command for case in found):
        print(f"{command:10}" + "".join(f"{counted[command, kind]:>11}" for kind in kinds))
    print(f"{'all':10}" + "".join(f"{sum(case.outcome == kind for case in found):>11}" for kind in kinds))
    sys.exit(any(case.outcome in BAD for case in found))


if __name__ == "__main__":
    main()
