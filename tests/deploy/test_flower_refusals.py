"""Who is not let in, and in which words: at the fleet's door, and at the control interface, which does not exist."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from deploy.conftest import make_node, open_link
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from atoll.deploy.certificates import ServerKeys, SiteKeys, make_keys, make_site_keys, read_members
from atoll.deploy.flower import node as node_module
from atoll.deploy.flower import wire
from atoll.deploy.flower.link import OPEN
from atoll.deploy.flower.node import Node
from atoll.kernel.errors import DeployError
from atoll.kernel.randomness import generator


def refuse(node: Node) -> str:
    """What a node says that is turned away."""
    with pytest.raises(DeployError) as refusal:
        node.serve(lambda envelope: envelope, threading.Event())
    return str(refusal.value)


def test_a_server_with_a_certificate_of_another_authority_is_not_trusted(keys, link, tmp_path):
    make_keys(tmp_path, hosts=["127.0.0.1"], sites=["Ulm"])
    text = refuse(make_node(keys, link, "Ulm", authority=tmp_path / "ca.crt"))
    assert text.startswith("The server's certificate must be signed by the authority in")
    assert "do not go on" in text
    assert link.connected() == set()


def test_a_certificate_for_another_name_is_not_trusted(keys, tmp_path):
    make_keys(tmp_path, hosts=["server.example"], sites=["Ulm"])
    with open_link(tmp_path) as link:
        assert "must be made out to the name it is called by, 127.0.0.1:" in refuse(make_node(tmp_path, link, "Ulm"))


def test_a_key_that_the_server_does_not_know_is_refused(keys, link, tmp_path):
    make_keys(tmp_path, hosts=[], sites=["Ulm"])
    stranger = Node(f"127.0.0.1:{link.port}", SiteKeys.read(tmp_path / "sites/Ulm").node, keys / "ca.crt")
    assert refuse(stranger).startswith("The server must know this site's key.")


def test_plain_text_is_refused_on_both_sides(keys, link):
    assert "leave out `insecure`" in refuse(make_node(keys, link, "Ulm", authority=None))
    with open_link(keys, certificate=None) as open_text:
        assert "answers in plain text" in refuse(make_node(keys, open_text, "Ulm"))


def test_a_clock_that_is_off_is_named(keys, link, monkeypatch):
    import datetime as dt

    from flwr.supernode import node_auth_http_interceptor as interceptor

    ahead = dt.timedelta(minutes=10)
    monkeypatch.setattr(interceptor, "now", lambda: dt.datetime.now(dt.UTC) + ahead)
    monkeypatch.setattr(node_module.time, "time", lambda real=time.time: real() + ahead.total_seconds())
    text = refuse(make_node(keys, link, "Ulm"))
    assert text.startswith("This machine's clock must agree with the server's to a few seconds. It is 60")


def test_a_request_without_a_signature_reaches_nothing(keys, link):
    with httpx.Client(base_url=f"https://127.0.0.1:{link.port}", verify=_trust(keys)) as stranger:
        headers = {"content-type": PROTOBUF_MEDIA_TYPE}
        for path in ("activate-node", "pull-messages", "push-messages", "push-object", "send-node-heartbeat"):
            answer = stranger.post(f"/v1/fleet/{path}", content=b"", headers=headers)
            assert answer.status_code == 401, path


@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/openapi.json", "/health", "/v1/control/start-run", "/v1/control/register-node",
        "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/v1/fleet/register-node",
        "/v1/fleet/unregister-node", "/v1/fleet/get-fab", "/v1/fleet/get-run", "/v1/fleet//activate-node",
        "/v1/control/../fleet/register-node", "/v1/fleet/activate-node/../../control/start-run",
    ],
)  # fmt: skip
def test_only_the_paths_that_nodes_need_are_open(keys, link, path):
    with httpx.Client(base_url=f"https://127.0.0.1:{link.port}", verify=_trust(keys)) as stranger:
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            assert stranger.request(method, path, content=b"").status_code == 404, method


def test_the_size_of_a_request_is_bounded_before_it_is_read(keys, link):
    with httpx.Client(base_url=f"https://127.0.0.1:{link.port}", verify=_trust(keys)) as stranger:
        path = "/v1/fleet/push-object"
        assert stranger.post(path, content=iter([b"x"])).status_code == 411  # in chunks of unknown number
    with _trust(keys).wrap_socket(
        socket.create_connection(("127.0.0.1", link.port)), server_hostname="127.0.0.1"
    ) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**33}\r\n\r\nxxxx".encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_the_program_of_flower_with_the_authoritys_certificate_can_neither_register_a_key_nor_start_a_run(
    keys, link, tmp_path
):
    """What a stock SuperLink with node authentication allows (shared port, no login) is not there to be called."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.dep]\naddress = "127.0.0.1:{link.port}"\nroot-certificates = "{keys / "ca.crt"}"\n'
    )
    app = tmp_path / "app"
    (app / "evil").mkdir(parents=True)
    (app / "evil" / "__init__.py").write_text("")
    (app / "evil" / "apps.py").write_text(
        "from flwr.serverapp import ServerApp\nfrom flwr.clientapp import ClientApp\nserver = ServerApp()\n"
        "client = ClientApp()\n"
    )
    (app / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "evil"\n'
        'version = "1.0.0"\ndependencies = []\nlicense = "Apache-2.0"\n[tool.flwr.app]\npublisher = "evil"\n'
        '[tool.flwr.app.components]\nserverapp = "evil.apps:server"\nclientapp = "evil.apps:client"\n'
    )
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    (tmp_path / "mine.pub").write_bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "FLWR_HOME": str(home), "HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    }  # fmt: skip
    nodes, runs = set(link._state.nodes), set(link._state.run_ids)
    for command in (
        ["flwr", "supernode", "register", str(tmp_path / "mine.pub"), "dep"],
        ["flwr", "supernode", "list", "dep"],
        ["flwr", "list", "dep"],
        ["flwr", "run", str(app), "dep"],
    ):
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0, (command, done.stdout, done.stderr)
        assert "404" in done.stdout + done.stderr or "Not Found" in done.stdout + done.stderr, (
            command,
            done.stdout,
            done.stderr,
        )
    assert (set(link._state.nodes), set(link._state.run_ids)) == (nodes, runs)
    assert link.connected() == set()


def test_what_is_no_message_of_flower_is_refused_and_the_link_lives(keys, link):
    """A known site that sends nonsense gets an answer, and nothing is kept."""
    node = make_node(keys, link, "Ulm")
    node._join()
    draw = generator(0, "fuzz")
    paths = sorted(OPEN - {"/v1/fleet/deactivate-node"})
    with node._client as http:
        seen = {_post_signed(http, path, draw.bytes(int(draw.integers(0, 200)))) for path in paths for _ in range(30)}
    assert seen <= {400, 401}, seen
    assert not link._state.object_store.store
    assert not link._state.message_res_store


def _post_signed(client, path: str, body: bytes) -> int:
    """Send bytes with the signature of a known site."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.supercore.protobuf.client import ProtobufRequestContext

    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    request = client._client.build_request("POST", f"{client._base_url}{path}", content=body, headers=headers)
    return client._send(ProtobufRequestContext("", PullMessagesRequest(), request)).status_code


def test_another_version_of_flower_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(wire, "version", lambda _: "1.42.0")
    with pytest.raises(DeployError, match=r"need Flower 1\.41\.x\. Version 1\.42\.0 is installed"):
        wire.require_flower()


def test_names_and_keys_of_sites_are_checked(tmp_path):
    sites = tmp_path / "server" / "sites"
    with pytest.raises(DeployError, match="A name must be 1 to 64 letters"):
        make_keys(tmp_path, hosts=[], sites=["../Ulm"])
    with pytest.raises(DeployError, match="Each site must have a name of its own"):
        make_keys(tmp_path, hosts=[], sites=["Ulm", "Ulm"])
    with pytest.raises(DeployError, match="The server must know the sites' public keys"):
        read_members(sites)
    make_keys(tmp_path, hosts=["localhost"], sites=["Ulm"])
    before = (tmp_path / "sites/Ulm/node.key").read_bytes()
    make_keys(tmp_path, hosts=[], sites=["Ulm", "Lund"])  # a second call adds
    assert (tmp_path / "sites/Ulm/node.key").read_bytes() == before
    assert sorted(ServerKeys.read(tmp_path / "server").members) == ["Lund", "Ulm"]
    for secret in ("ca.key", "server/server.key", "server/coordinator.key", "sites/Ulm/node.key", "sites/Ulm/Ulm.key"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0, secret
    own = make_site_keys(tmp_path / "own", "Porto")  # a site makes its own, and hands over the public part
    (sites / "Porto.pub").write_bytes(own[-1].read_bytes())
    assert sorted(read_members(sites)) == ["Lund", "Porto", "Ulm"]
    (sites / "Twin.pub").write_bytes((sites / "Ulm.pub").read_bytes())
    with pytest.raises(DeployError, match="must have the site's name"):
        read_members(sites)
    (sites / "Twin.pub").write_bytes((sites / "Ulm.pub").read_bytes().replace(b" Ulm", b" Twin"))
    with pytest.raises(DeployError, match="Twin and Ulm have the same one"):
        read_members(sites)
    with pytest.raises(DeployError, match="must not be overwritten"):
        make_site_keys(tmp_path / "sites/Ulm", "Ulm")
    with pytest.raises(DeployError, match="A site must show who it is"):
        SiteKeys.read(tmp_path / "nowhere")


def _trust(keys: Path):
    import ssl

    return ssl.create_default_context(cafile=str(keys / "ca.crt"))


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("fedavg", ["--secure", "sums"], "hides nothing"),
        ("fedavg+dpsgd", [], "would protect no sample"),
        ("fedavg", ["--dp", "client:noise=1,clip=adaptive"], "A clip that adapts is simulated"),
        ("fedavg", ["--dp", "client:noise=1", "--cohort", "poisson:0.5"], "nothing is gained by chance"),
        ("fedavg", ["--compress", "top"], "Unknown compression"),
        ("fedamp", ["--secure", "masks"], "hide single replies"),
        ("fedamp", ["--dp", "client:noise=1"], "reads single replies"),
    ],
)
def test_a_server_refuses_a_protection_that_would_be_a_lie_before_it_listens(tmp_path, keys, method, words, said):
    from deploy.story import write_hospital
    from typer.testing import CliRunner

    from atoll.cli import app

    write_hospital(tmp_path / "my.csv", 0)
    schema = tmp_path / "schema.json"
    made = CliRunner().invoke(
        app, ["data", "schema", str(tmp_path / "my.csv"), "--target", "readmitted", "-o", str(schema)]
    )
    assert made.exit_code == 0, made.output
    asked = ["--method", method, "--own-schema", str(schema), "--keys", str(keys / "server"), *words]
    found = CliRunner().invoke(app, ["server", *asked, "--out", str(tmp_path / "run"), "--wait", "0.1"])
    assert found.exit_code != 0
    assert said in " ".join(found.output.split())
    assert "listening" not in found.output


def test_a_servers_words_become_settings():
    from atoll.cli.deploying import ServerOptions

    words = {"secure": "masks", "dp": "client:epsilon=8", "compress": "randk:0.5", "aggregate": "mean"}
    settings = ServerOptions(**words).settings(3)
    assert {name: getattr(settings, name) for name in words} == words
