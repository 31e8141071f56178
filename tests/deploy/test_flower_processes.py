"""Sites in processes of their own: the bits of a simulation, what kill -9 leaves, the commands as users type them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from deploy.conftest import SITES, open_link
from deploy.test_engine import messages, same
from deploy.test_flower_federation import Network
from typer.testing import CliRunner

from atoll.cli import app
from atoll.compose import create
from atoll.data.own import find_schema_of
from atoll.deploy.certificates import make_keys
from atoll.kernel.randomness import generator

FIVE = (
    "ditto", "fedamp", "ditto@ifca:clusters=2,cluster_rounds=1", "fedora", "oneshot-margins:epochs=2",
)  # fmt: skip  # private state, unicast, clusters, an exchange before the first round, one shot


def start_site(name: str, link, keys: Path, folder: Path) -> subprocess.Popen:
    program = Path(__file__).with_name("site_process.py")
    address = f"127.0.0.1:{link.port}"
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(program), name, address, str(keys), str(folder / name)], stdout=log, stderr=log
        )


@pytest.fixture
def processes():
    started: list[subprocess.Popen] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.slow
def test_five_methods_give_the_bits_of_a_simulation_in_processes(tmp_path, keys, processes):
    with open_link(keys, patience=5.0) as link:
        processes += [start_site(name, link, keys, tmp_path) for name in SITES]
        for number, name in enumerate(FIVE):
            method = create(name)
            network = Network(tmp_path / str(number), keys, rounds=1 if method.one_shot else 3)
            report = network.serve(link, method, tmp_path / f"run-{number}")
            simulated = network.simulate(method)
            assert [line["lost"] for line in report.history] == [{}] * network.rounds, name
            assert same(report.server, simulated.server), name
            np.testing.assert_array_equal(report.scores(), simulated.scores(), err_msg=name)
            assert messages(report) == messages(simulated), name
    for name in SITES:  # nobody else was looked up or spoken to
        spoken_to = set((tmp_path / f"{name}.addresses").read_text().splitlines())
        assert spoken_to <= {"127.0.0.1", str(("127.0.0.1", link.port))}


@pytest.mark.slow
def test_a_site_that_is_killed_in_a_round_comes_back_and_nothing_changes(tmp_path, keys, processes):
    network, method = Network(tmp_path, keys, rounds=4), create("ditto")
    with open_link(keys, patience=2.0) as link:
        by_name = {name: start_site(name, link, keys, tmp_path) for name in SITES}
        processes += by_name.values()

        def kill(round):
            if round.round in (1, 3):
                by_name["Ulm"].send_signal(signal.SIGKILL)
                by_name["Ulm"].wait()
                by_name["Ulm"] = start_site("Ulm", link, keys, tmp_path)
                processes.append(by_name["Ulm"])

        report = network.serve(link, method, tmp_path / "run", on_round=kill)
    simulated = network.simulate(method)
    assert [line["lost"] for line in report.history] == [{}] * 4
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())


def run(*words: str):
    return CliRunner().invoke(app, [*words], terminal_width=200)


def write_data(folder: Path, *, rows: int = 40, name: str = "site", wards: int = 1, column: str = "age") -> Path:
    draw = generator(0, "rows", name)
    lines = [f"{column},pulse,ward,ill"]
    for number in range(rows):
        age, pulse = draw.normal(60, 10), draw.normal(80, 9)
        lines.append(f"{age:.1f},{pulse:.1f},w{number % wards},{'yes' if age + pulse > 140 else 'no'}")
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_the_commands_as_users_type_them(tmp_path, processes):
    """One site has two clients, behind one connection; one has a column that does not fit; the server is killed."""
    ulm, lund = write_data(tmp_path, name="Ulm", wards=2, rows=60), write_data(tmp_path, name="Lund", rows=30)
    wrong = write_data(tmp_path, name="Porto", column="years")
    find_schema_of(ulm, target="ill", client="ward").save(tmp_path / "schema.json")
    make_keys(tmp_path / "keys", hosts=["127.0.0.1"], sites=["Ulm", "Lund", "Porto"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(name: str, *words: str) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("ab") as log:
            one = subprocess.Popen(
                [sys.executable, "-m", "atoll", *words], stdout=log, stderr=log, cwd=tmp_path,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        processes.append(one)
        return one

    network = ("--keys", "keys/server", "--listen", address, "--out", "run", "--grace", "30")
    first = start(
        "server", "server", "--method", "ditto", "--rounds", "6", "--own-schema", "schema.json", "--sites", "2",
        "--eval-every", "1", *network,
    )  # fmt: skip
    sites = {
        name: start(
            name, "client", "--server", address, "--data", str(data), "--keys", f"keys/sites/{name}", "--state",
            f"state/{name}", *more,
        )
        for name, data, more in (("Porto", wrong, ()), ("Ulm", ulm, ("--client", "ward")), ("Lund", lund, ()))
    }  # fmt: skip
    lines = tmp_path / "run" / "metrics.jsonl"
    while first.poll() is None and not (lines.exists() and len(lines.read_text().splitlines()) >= 2):
        time.sleep(0.05)
    first.kill()
    first.wait()
    again = start("server", "server", "--resume", *network)
    assert again.wait(150) == 0, (tmp_path / "server.log").read_text()
    for name in ("Ulm", "Lund"):
        assert sites[name].wait(60) == 0, (tmp_path / f"{name}.log").read_text()
    log = " ".join((tmp_path / "server.log").read_text().split())
    assert "Porto does not take part:" in log
    assert "column 'age'" in log or "`age`" in log
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["round"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert [line["lost"] for line in written] == [{}] * 6
    assert len(written[-1]["evaluation"]["personal"]["test"]["clients"]) == 3  # two of Ulm, one of Lund
    assert (tmp_path / "run" / "report.html").exists()
    assert len([*(tmp_path / "state" / "Ulm" / "models").rglob("*.safetensors")]) == 2
    assert len([*(tmp_path / "state" / "Lund" / "models").rglob("*.safetensors")]) == 1


def test_what_commands_say_to_bad_input(tmp_path):
    assert "--host nor --site" in run("deploy", "keys", "-o", str(tmp_path)).output
    assert "A site makes its own keys alone" in run("deploy", "keys", "--own", "Ulm", "--site", "Ulm").output
    made = run("deploy", "keys", "-o", str(tmp_path / "keys"), "--host", "127.0.0.1", "--site", "Ulm")
    assert made.exit_code == 0
    server = ("server", "--keys", str(tmp_path / "keys" / "server"))
    assert "--method NAME" in run(*server).output
    assert "--own-schema FILE" in run(*server, "--method", "ditto").output
    assert "`--resume` must come with `--out`" in run(*server, "--resume").output
    assert "holds no federation.json" in run(*server, "--resume", "--out", str(tmp_path / "run")).output
    assert "There is no" in run("server", "--keys", str(tmp_path / "none"), "--method", "ditto").output
    data = write_data(tmp_path)
    find_schema_of(data, target="ill").save(tmp_path / "schema.json")
    asked = (*server, "--own-schema", str(tmp_path / "schema.json"))
    assert "needs data of the server's own" in run(*asked, "--method", "feddf").output
    assert "must be HOST:PORT" in run(*asked, "--method", "ditto", "--listen", "here").output
    client = ("client", "--server", "127.0.0.1:1", "--state", str(tmp_path / "state"))
    nobody = run(*client, "--data", str(data), "--keys", str(tmp_path))
    assert "A site must show who it is" in nobody.output
    site = str(tmp_path / "keys" / "sites" / "Ulm")
    assert "There is no" in run(*client, "--data", str(tmp_path / "none.csv"), "--keys", site).output
    for outcome in (nobody, run(*server)):
        assert outcome.exit_code == 2
