"""The page of a run that goes on, served to this machine."""

import threading
import urllib.error
import urllib.request
from http.client import HTTPConnection

import pytest

from atoll import federate
from atoll.data.recipe import Recipe
from atoll.experiments import watching
from atoll.experiments.watching import Watched, serve
from atoll.kernel.errors import RunError


@pytest.fixture
def served(tmp_path):
    """Begin a run that waits after its first round; return its server, what lets it go on, and its thread."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(line):
        if line.round == 1:
            begun.set()
            go_on.wait(60)

    task = Recipe("digits", clients=3).build()
    work = threading.Thread(
        target=federate, args=(task, "fedavg"),
        kwargs={
            "rounds": 3, "eval_every": 1, "folder": tmp_path / "run", "on_round": wait, "stop": threading.Event(),
            "progress": False,
        },
    )  # fmt: skip
    work.start()
    assert begun.wait(60)
    server = serve(tmp_path / "run")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server, go_on, work
    go_on.set()
    work.join()
    server.shutdown()
    server.server_close()
    thread.join()


def get(server, path=""):
    with urllib.request.urlopen(server.address + path) as answer:
        return answer.read().decode()


def test_the_page_follows_a_run(served):
    server, go_on, work = served
    text, version = get(server), get(server, "version")
    assert "1 of 3 rounds" in text
    assert "reloads by itself" in text
    assert "location.reload()" in text
    assert get(server, "version") == version
    go_on.set()
    work.join()
    assert get(server, "version") != version
    text = get(server)
    assert "All runs are finished." in text
    assert 'role="alert"' not in text


def test_only_this_machine_and_only_the_page(served):
    server, _, _ = served
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "config.json")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "../run/config.json")
    connection = HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request("GET", "/", headers={"Host": "evil.example:80"})  # a site that names this machine as its own
    assert connection.getresponse().status == 421
    connection.close()
    with urllib.request.urlopen(server.address) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_a_run_without_scores_is_waited_for(tmp_path):
    federate(Recipe("digits", clients=3).build(), "fedavg", rounds=1, folder=tmp_path, evaluation="none")
    text = Watched(tmp_path).page()
    assert "Waiting for the first scores" in text
    assert "fedavg with seed 0: 1 of 1 rounds" in text


def test_a_page_stays_while_files_cannot_be_read(tmp_path, monkeypatch):
    federate(Recipe("digits", clients=3).build(), "fedavg", rounds=1, folder=tmp_path)
    watched = Watched(tmp_path)
    before = watched.page()

    def fail(*_, **__):
        raise RunError("half written")

    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(watching, "read_runs", fail)
    assert watched.page() == before


def test_there_must_be_something_to_watch(tmp_path):
    with pytest.raises(RunError, match="There must be a run or a comparison to watch"):
        serve(tmp_path)


def test_a_port_that_is_taken(served, tmp_path):
    server, _, _ = served
    with pytest.raises(RunError, match="must have a port of its own"):
        serve(tmp_path / "run", port=server.server_address[1])
