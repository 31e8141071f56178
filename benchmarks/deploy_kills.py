"""kill -9 at random moments of a federation on localhost: the server and every site, and what comes of it.

    python benchmarks/deploy_kills.py                          50 moments
    python benchmarks/deploy_kills.py --moments 10 --seed 3

One server and three sites, each a process of `atoll server` and `atoll client`, with TLS and authentication; Ditto, ten
rounds. In each trial one of them is killed at a random moment and started again with the same command (the server with
--resume). The result must be that of the undisturbed run, bit for bit, wherever nobody was lost for a round; what sites
keep must be the same, too. Processes are forked from one that has loaded everything, and a silent site counts as gone
after 2 s instead of 10, so a trial takes seconds.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from hospitals import HOSPITALS, invent

import atoll.cli
import atoll.deploy.client
import atoll.deploy.flower.link as link
import atoll.deploy.flower.node as node
import atoll.deploy.models
import atoll.deploy.server
import atoll.experiments.comparison
from atoll.data.own import find_schema_of
from atoll.deploy.certificates import make_keys
from atoll.kernel.randomness import generator

ROUNDS = 10
LONGEST = 120.0  # seconds of a trial

link.Link.__init__.__kwdefaults__ |= {"patience": 2.0}  # type: ignore[misc]
node.Node.__init__.__kwdefaults__ |= {"beat": 0.4, "retry": 0.2}  # type: ignore[misc]


class Trial:
    """A federation in a folder; one of its processes may be killed on the way."""

    def __init__(self, home: Path, folder: Path, method: str) -> None:
        self.folder, self.running, self.killed = folder, dict[str, int](), False
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        keys = home / "keys"
        self.commands = {
            "server": [
                "server", "--method", method, "--rounds", str(ROUNDS), "--own-schema", str(home / "schema.json"),
                "--keys", str(keys / "server"), "--listen", f"127.0.0.1:{port}", "--out", str(folder / "run"),
                "--grace", "30", "--device", "cpu", "--eval-every", "1",
            ]
        }  # fmt: skip
        for name in HOSPITALS:
            self.commands[name] = [
                "client", "--server", f"127.0.0.1:{port}", "--data", str(home / "data" / f"{name}.csv"), "--state",
                str(folder / name), "--keys", str(keys / "sites" / name), "--engine", "loop eager", "--device", "cpu",
            ]  # fmt: skip

    def start(self, who: str) -> None:
        command = self.commands[who]
        if who == "server" and (self.folder / "run" / "federation.json").exists():
            command = [*command, "--resume"]
        self.running[who] = _fork(command, self.folder / f"{who}.log")

    def play(self, victim: str | None, moment: float) -> float:
        """Run the federation; kill the victim at a moment; return how long it took."""
        began = time.monotonic()
        for who in self.commands:
            self.start(who)
        try:
            while "server" in self.running or self.running:
                now = time.monotonic() - began
                if now > LONGEST:
                    raise TimeoutError(f"not over after {LONGEST:g} s")
                if victim is not None and now >= moment:
                    if victim in self.running:
                        os.kill(self.running[victim], signal.SIGKILL)
                        os.waitpid(self.running.pop(victim), 0)
                        time.sleep(0.1)
                        self.start(victim)
                        self.killed = True
                    victim = None
                for who, process in list(self.running.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        del self.running[who]
                        if status:
                            raise ChildProcessError(f"{who} ended with {os.waitstatus_to_exitcode(status)}")
                time.sleep(0.01)
            return time.monotonic() - began
        finally:
            for process in self.running.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def result(self) -> tuple[dict[str, Any], list[str]]:
        """Return all that must be the same again, and who was lost."""
        lines = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        lost = [f"round {line['round']}: {reason}" for line in lines for reason in line["lost"]]
        found: dict[str, Any] = {"rounds": [[line["round"], line["replied"], line.get("evaluation")] for line in lines]}
        for name in HOSPITALS:
            states = list((self.folder / name).glob("*/state.json"))
            state = json.loads(states[0].read_text())
            kept = (state["pending"] or state)["kept"]
            found[name] = [len(states), state["committed_round"], _digest(states[0].with_name(kept))]
        return found, lost


def _digest(path: Path) -> str:
    """Digest the tensors of a file; the order in which their names are written is not always the same."""
    tensors = load_file(path)
    return hashlib.sha256(
        b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def _differences(one: Any, other: Any, where: str = "") -> list[str]:
    """List where two results differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in _differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for key, (a, b) in pairs for line in _differences(a, b, f"{where}/{key}")]
    return [] if one == other else [f"{where}: {one} became {other}"]


def _fork(command: list[str], log: Path) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        sys.argv = ["atoll", *command]
        atoll.cli.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)


def main(moments: int, seed: int, method: str) -> None:
    torch.set_num_threads(1)
    failures, identical, losses = 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        (home / "data").mkdir()
        invent(home / "data")
        find_schema_of(home / "data" / "Ulm.csv", target="readmitted").save(home / "schema.json")
        make_keys(home / "keys", hosts=["127.0.0.1"], sites=[*HOSPITALS])
        undisturbed = Trial(home, home / "undisturbed", method)
        undisturbed.folder.mkdir()
        took = undisturbed.play(None, 0.0)
        expected, lost = undisturbed.result()
        assert not lost, lost
        assert len(expected["rounds"]) == ROUNDS
        print(f"undisturbed: {took:.1f} s", flush=True)
        draw = generator(seed, "kills")
        number = 0
        while number < moments:
            victim = list(undisturbed.commands)[number % len(undisturbed.commands)]
            moment = float(draw.uniform(0, took))
            trial = Trial(home, home / f"trial-{number}", method)
            trial.folder.mkdir()
            try:
                seconds = trial.play(victim, moment)
                took = min(took, seconds)  # on a machine that others use, no run is as long as the one before
                if not trial.killed:  # it was over already
                    shutil.rmtree(trial.folder)
                    continue
                found, lost = trial.result()
                verdict = "identical" if found == expected else "valid, " + "; ".join(lost) if lost else "DIFFERENT"
                identical, losses = identical + (found == expected), losses + bool(lost)
                if verdict == "DIFFERENT" or (lost and len(found["rounds"]) != ROUNDS):
                    failures += 1
            except (TimeoutError, ChildProcessError, OSError, ValueError) as error:
                verdict, seconds, failures = f"FAILED: {error}", 0.0, failures + 1
            number += 1
            print(f"{number:3}  {victim:<7} at {moment:5.2f} s  {seconds:5.1f} s  {verdict}", flush=True)
            if verdict == "DIFFERENT":
                print(*_differences(expected, found), sep="\n", flush=True)
            if "FAILED" in verdict or verdict == "DIFFERENT":
                for who in trial.commands:
                    print(f"--- {who}\n{(trial.folder / f'{who}.log').read_text()[-3000:]}", flush=True)
            shutil.rmtree(trial.folder)
    print(f"{moments} moments: {identical} identical, {losses} with a loss and valid, {failures} failed")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="ditto")
    given = parser.parse_args()
    main(given.moments, given.seed, given.method)
