"""What a round costs on a network before any training: an envelope to each of three sites and back, on localhost.

    python benchmarks/deploy_rounds.py            ours: TLS, node authentication, three processes that stay
    python benchmarks/deploy_rounds.py --stock    Flower's own programs: a process per message (no TLS, no login)

Neither loads torch at the sites; the envelope has the size of a small model (20 kB) by default.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SITES = ("Lund", "Porto", "Ulm")
NODE = """
import sys, threading
from pathlib import Path
from atoll.deploy.certificates import SiteKeys
from atoll.deploy.flower.node import Node
keys, server = Path(sys.argv[1]), sys.argv[2]
Node(server, SiteKeys.read(keys).node, keys / "ca.crt").serve(lambda envelope: envelope, threading.Event())
"""
SERVER_APP = """
import time
from pathlib import Path
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

server = ServerApp()

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    lines = []
    for number in range(ROUNDS):
        began = time.time()
        content = lambda: RecordDict({"a": ArrayRecord({"e": Array("uint8", (SIZE,), "bytes", bytes(SIZE))})})
        messages = [Message(content(), node, "query", group_id=str(number)) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages, timeout=60))
        assert len(replies) == 3, replies
        lines.append(str(time.time() - began))
    Path("TIMES").write_text("\\n".join(lines))
"""
CLIENT_APP = """
from flwr.app import Message
from flwr.clientapp import ClientApp

client = ClientApp()

@client.query()
def query(message, context):
    return Message(message.content, reply_to=message)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "echo"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "atoll"
[tool.flwr.app.components]
serverapp = "echo.server:server"
clientapp = "echo.client:client"
"""


def measure_ours(rounds: int, size: int) -> list[float]:
    from atoll.deploy.certificates import make_keys, read_members
    from atoll.deploy.flower.link import Link

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder)
        make_keys(keys, hosts=["127.0.0.1"], sites=SITES)
        certificate = keys / "server" / "server.crt", keys / "server" / "server.key"
        sites = {name: one.node for name, one in read_members(keys / "server" / "sites").items()}
        with Link(("127.0.0.1", 0), sites, certificate) as link:
            address = f"127.0.0.1:{link.port}"
            nodes = [
                subprocess.Popen([sys.executable, "-c", NODE, str(keys / "sites" / name), address]) for name in SITES
            ]
            try:
                while len(link.connected()) < len(SITES):
                    time.sleep(0.1)
                times = []
                for number in range(rounds + 1):
                    began = time.perf_counter()
                    sent = {name: bytes([number % 256]) * size for name in SITES}
                    assert len(list(link.exchange(sent, timeout=60, grace=10))) == len(SITES)
                    times.append(time.perf_counter() - began)
                return times[1:]  # the first one opens connections
            finally:
                for node in nodes:
                    node.terminate()
                for node in nodes:
                    node.wait()


def measure_stock(rounds: int, size: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        home, app = Path(folder) / "home", Path(folder) / "app"
        home.mkdir()
        (app / "echo").mkdir(parents=True)
        times = Path(folder) / "times"
        (home / "config.toml").write_text('[superlink.dep]\naddress = "127.0.0.1:8765"\ninsecure = true\n')
        (app / "pyproject.toml").write_text(PROJECT)
        (app / "echo" / "__init__.py").write_text("")
        text = SERVER_APP.replace("ROUNDS", str(rounds)).replace("SIZE", str(size)).replace("TIMES", str(times))
        (app / "echo" / "server.py").write_text(text)
        (app / "echo" / "client.py").write_text(CLIENT_APP)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": path}
        started: list[subprocess.Popen[bytes]] = []

        def start(*command: str) -> None:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(command, env=os.environ | more, start_new_session=True, **quiet))

        try:
            start(
                "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", "8765",
                "--disable-runtime-dependency-installation",
            )  # fmt: skip
            time.sleep(5)
            for number in range(len(SITES)):
                start(
                    "flower-supernode", "--insecure", "--superlink", "127.0.0.1:8765", "--host", "127.0.0.1", "--port",
                    str(9200 + number),
                )  # fmt: skip
            time.sleep(5)
            subprocess.run(["flwr", "run", str(app), "dep"], env=os.environ | more, check=True, cwd=folder)
            until = time.monotonic() + 60 + 30 * rounds
            while not times.exists() and time.monotonic() < until:
                time.sleep(0.5)
            return [float(line) for line in times.read_text().splitlines()]
        finally:
            for one in started:
                os.killpg(one.pid, signal.SIGTERM)
            for one in started:
                one.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=20_000)
    given = parser.parse_args()
    found = (measure_stock if given.stock else measure_ours)(given.rounds, given.size)
    print(
        f"{len(found)} rounds of {given.size:,} bytes with {len(SITES)} sites: median "
        f"{statistics.median(found):.3f} s, from {min(found):.3f} to {max(found):.3f} s"
    )
