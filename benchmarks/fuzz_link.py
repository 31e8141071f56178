"""10,000 bad requests at the server's door: garbage, and real requests of a known site with bytes changed or cut off.

    python benchmarks/fuzz_link.py
    python benchmarks/fuzz_link.py --requests 1000 --seed 7

Each must be answered with a refusal (4xx) or, where the change leaves it a sound request, with what that asks for. None
may reach a path that is closed, end in an error of the server (5xx), stay in its memory, or keep honest sites out.
"""

import argparse
import resource
import tempfile
import threading
from collections import Counter
from pathlib import Path

import httpx

from atoll.deploy.certificates import SiteKeys, make_keys, read_members
from atoll.deploy.flower.link import OPEN, Link
from atoll.deploy.flower.node import Node
from atoll.deploy.network import Arrived
from atoll.kernel.randomness import generator

CLOSED = ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/push-messages", "/v1/fleet/register-node")


def main(requests: int, seed: int) -> None:
    draw = generator(seed, "fuzz the link")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder)
        make_keys(keys, hosts=["127.0.0.1"], sites=["Lund", "Ulm"])
        certificate = keys / "server" / "server.crt", keys / "server" / "server.key"
        sites = {name: one.node for name, one in read_members(keys / "server" / "sites").items()}
        with Link(("127.0.0.1", 0), sites, certificate, hold=0.05) as link:
            recorded, honest = _record(link, keys), _node(link, keys, "Ulm")
            bad = _node(link, keys, "Lund")
            bad._join()
            heap = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answers: Counter[tuple[str, int]] = Counter()
            with bad._client as client:
                for number in range(requests):
                    path, body = recorded[int(draw.integers(len(recorded)))]
                    kind = ("garbage", "changed", "cut", "closed", "unsigned")[number % 5]
                    if kind == "garbage":
                        body = draw.bytes(int(draw.integers(0, 4000)))
                    elif kind == "cut":
                        body = body[: int(draw.integers(0, len(body) + 1))]
                    elif kind == "closed":
                        path = CLOSED[number // 5 % len(CLOSED)]
                    else:
                        changed = bytearray(body)
                        for place in draw.integers(0, max(1, len(body)), size=1 + number % 7):
                            changed[place : place + 1] = draw.bytes(1)
                        body = bytes(changed)
                    answers[kind, _post(client, path, body, signed=kind != "unsigned")] += 1
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - heap) / 1024
            stop = threading.Event()
            again = threading.Thread(target=honest.serve, args=(lambda envelope: envelope, stop))
            again.start()
            fine = list(link.exchange({"Ulm": b"still here"}, timeout=60, grace=30)) == [Arrived("Ulm", b"still here")]
            stop.set()
            again.join()
            for (kind, status), count in sorted(answers.items()):
                print(f"{kind:<9} {status}  {count}")
            left = len(link._state.message_res_store), len(link._state.object_store.store)
            print(f"memory grew by {grown:.0f} MB; left behind: {left}; an honest site is served: {fine}")
            failed = sum(count for (kind, status), count in answers.items() if status >= 500)
            reached = sum(count for (kind, status), count in answers.items() if kind == "closed" and status != 404)
            taken = sum(count for (kind, status), count in answers.items() if kind == "unsigned" and status < 400)
            print(
                f"{requests} requests: {failed} errors of the server, {reached} reached a closed path, {taken} unsigned"
            )
            raise SystemExit(bool(failed or reached or taken or not fine or any(left) or grown > 200))


def _node(link: Link, keys: Path, name: str) -> Node:
    key = SiteKeys.read(keys / "sites" / name).node
    return Node(f"127.0.0.1:{link.port}", key, keys / "ca.crt", retry=0.1)


def _record(link: Link, keys: Path) -> list[tuple[str, bytes]]:
    """Return the requests of a node of Lund that answers a message."""
    recorded: list[tuple[str, bytes]] = []
    node = _node(link, keys, "Lund")
    node._client._client.event_hooks["request"] = [
        lambda request: recorded.append((request.url.path, request.content))  # type: ignore[list-item]
    ]
    stop = threading.Event()
    thread = threading.Thread(target=node.serve, args=(lambda envelope: envelope[::-1], stop))
    thread.start()
    assert [type(one) for one in link.exchange({"Lund": bytes(2000)}, timeout=30, grace=10)] == [Arrived]
    stop.set()
    thread.join()
    assert {path for path, _ in recorded} <= OPEN
    return [one for one in recorded if not one[0].endswith("deactivate-node")]


def _post(client: object, path: str, body: bytes, *, signed: bool) -> int:
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    http: httpx.Client = client._client  # type: ignore[attr-defined]
    request = http.build_request("POST", f"{client._base_url}{path}", content=body, headers=headers)  # type: ignore[attr-defined]
    if not signed:
        return http.send(request).status_code
    return client._send(ProtobufRequestContext("", PullMessagesRequest(), request)).status_code  # type: ignore[attr-defined]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.requests, given.seed)
