"""Downloads from a server on this machine that behaves well, or badly in one chosen way."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from atoll.cli import app
from atoll.data import datasets, download
from atoll.data.download import fetch, verify
from atoll.kernel.errors import DataError, UnknownName

RATINGS = "".join(f"{user}::0000001::7::{time}\n" for user in (1, 2) for time in range(400)).encode()
Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@dataclass
class Site:
    """Files on a server, how it answers (the last entry for good), and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    base: str = ""

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.ranges.append(request.headers.get("Range"))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer(request, self.files[request.path[1:]])


def send(request: BaseHTTPRequestHandler, content: bytes, status=200, length=None, **headers) -> None:
    request.send_response(status)
    if length != "none":
        request.send_header("Content-Length", str(len(content) if length is None else length))
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(content)


def well(request: BaseHTTPRequestHandler, content: bytes) -> None:
    """Serve everything, or what is left from where the client wants to go on."""
    wanted = request.headers.get("Range")
    first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
    if first >= len(content):
        request.send_error(416)
    elif wanted:
        send(request, content[first:], 206, Content_Range=f"bytes {first}-{len(content) - 1}/{len(content)}")
    else:
        send(request, content)


def whole(request: BaseHTTPRequestHandler, content: bytes) -> None:
    """A server that knows no ranges."""
    send(request, content)


def without_length(request: BaseHTTPRequestHandler, content: bytes) -> None:
    send(request, content, length="none")


def truncated(request: BaseHTTPRequestHandler, content: bytes) -> None:
    """Half of it, and the connection ends."""
    send(request, content[: len(content) // 2], length=len(content))


def corrupt(request: BaseHTTPRequestHandler, content: bytes) -> None:
    send(request, content[:-1] + bytes([content[-1] ^ 1]))


def other_range(request: BaseHTTPRequestHandler, content: bytes) -> None:
    send(request, content, 206, Content_Range=f"bytes 0-{len(content) - 1}/{len(content)}")


def refuse(status: int) -> Answer:
    return lambda request, content: request.send_error(status)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.handle(self)

        def log_message(self, *_: object) -> None:
            """Quietly."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.base = f"http://127.0.0.1:{server.server_port}/"
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def ratings(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with a small ratings.dat, whose checksum is known."""
    site.files["ratings.dat"] = RATINGS
    monkeypatch.setitem(download.CHECKSUMS, "movietweetings", {"ratings.dat": sha256(RATINGS)})
    return site


def get(site: Site, root: Path, name="movietweetings", **options) -> list[Path]:
    return fetch(name, root, base=site.base, pause=0, **options)


def everything_in(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


FILE, PART = "movietweetings/ratings.dat", "movietweetings/.ratings.dat.part"

# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "ranges"),
    [
        ([well], [None]),
        ([without_length], [None]),
        ([truncated, well], [None, "half"]),
        ([truncated, whole], [None, "half"]),
        ([truncated, other_range, well], [None, "half", "half"]),
        ([corrupt, well], [None, None]),
        ([refuse(503), well], [None, None]),
        ([refuse(429), refuse(500), well], [None, None, None]),
    ],
    ids=lambda value: "-".join(getattr(one, "__name__", str(one)) for one in value),
)
def test_a_file_arrives_whole_or_is_asked_for_again(ratings, tmp_path, answers, ranges):
    """After a connection that ended early the transfer goes on where it stopped, if the server can."""
    ratings.answers = answers
    assert get(ratings, tmp_path) == [tmp_path / FILE]
    assert (tmp_path / FILE).read_bytes() == RATINGS
    assert everything_in(tmp_path) == [FILE]
    assert ratings.ranges == [one and f"bytes={len(RATINGS) // 2}-" for one in ranges]


def test_what_was_fetched_is_read(ratings, tmp_path):
    ratings.answers = [well]
    get(ratings, tmp_path)
    assert len(datasets.load("movietweetings", tmp_path).y) == 800


def test_a_later_call_goes_on_where_an_earlier_one_stopped(ratings, tmp_path):
    ratings.answers = [truncated]
    with pytest.raises(DataError, match=r"the connection ended after \d+ of \d+ bytes"):
        get(ratings, tmp_path, tries=1)
    assert everything_in(tmp_path) == [PART]
    ratings.answers = [well]
    get(ratings, tmp_path)
    assert ratings.ranges[-1] == f"bytes={len(RATINGS) // 2}-"
    assert everything_in(tmp_path) == [FILE]


@pytest.mark.parametrize("rest", [b"X" * 50, RATINGS + b"more", b"X" * len(RATINGS)])
def test_a_beginning_that_is_wrong_is_thrown_away(ratings, tmp_path, rest):
    """Of another file, longer than the file, or as long as it."""
    (tmp_path / "movietweetings").mkdir()
    (tmp_path / PART).write_bytes(rest)
    ratings.answers = [well]
    get(ratings, tmp_path)
    assert (tmp_path / FILE).read_bytes() == RATINGS
    assert len(ratings.ranges) == 2


def test_a_whole_file_that_was_not_yet_placed_needs_no_network(ratings, tmp_path):
    (tmp_path / "movietweetings").mkdir()
    (tmp_path / PART).write_bytes(RATINGS)
    get(ratings, tmp_path)
    assert everything_in(tmp_path) == [FILE]
    assert ratings.ranges == []


def test_a_file_that_is_right_is_kept_and_a_wrong_one_replaced(ratings, tmp_path):
    ratings.answers = [well]
    get(ratings, tmp_path)
    get(ratings, tmp_path)
    assert len(ratings.ranges) == 1
    (tmp_path / FILE).write_bytes(b"damaged")
    get(ratings, tmp_path)
    assert len(ratings.ranges) == 2
    assert (tmp_path / FILE).read_bytes() == RATINGS


# -- what does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "asked", "said", "left"),
    [
        (refuse(403), 1, "HTTP Error 403: Forbidden", []),
        (refuse(404), 1, "HTTP Error 404: Not Found", []),
        (refuse(503), 3, "HTTP Error 503: Service Unavailable", []),
        (corrupt, 3, f"its checksum must be {sha256(RATINGS)}, and is ", []),
        (truncated, 3, "the connection ended after ", [PART]),
    ],
    ids=["403", "404", "503", "corrupt", "truncated"],
)
def test_tries_are_counted_and_nothing_wrong_is_placed(ratings, tmp_path, answer, asked, said, left):
    ratings.answers = [answer]
    with pytest.raises(DataError) as caught:
        get(ratings, tmp_path, tries=3)
    assert str(caught.value).startswith(f"{ratings.base}ratings.dat could not be fetched: {said}")
    assert ("is kept and continued" in caught.value.hint) == bool(left)
    assert len(ratings.ranges) == asked
    assert everything_in(tmp_path) == left


def test_a_failed_transfer_leaves_the_old_file_in_its_place(ratings, tmp_path):
    (tmp_path / "movietweetings").mkdir()
    (tmp_path / FILE).write_bytes(b"old")
    ratings.answers = [refuse(404)]
    with pytest.raises(DataError):
        get(ratings, tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"old"


def test_nobody_listens(tmp_path, ratings):
    closed = Site(base="http://127.0.0.1:9/")
    with pytest.raises(DataError, match="could not be fetched: .*refused"):
        get(closed, tmp_path, tries=2)


def test_a_folder_that_cannot_be_made(ratings, tmp_path):
    (tmp_path / "movietweetings").write_text("a file")
    with pytest.raises(DataError, match="movietweetings could not be written"):
        get(ratings, tmp_path)


@pytest.mark.parametrize("name", ["hapt", "shakespeare", "femnist"])
def test_sets_without_a_checksum_say_where_they_are(tmp_path, name):
    with pytest.raises(DataError) as caught:
        fetch(name, tmp_path)
    assert str(caught.value).startswith(f"`{name}` cannot be fetched by Atoll.\nhint: ")
    assert "https://" in caught.value.hint


def test_sets_without_files_and_unknown_ones(tmp_path):
    with pytest.raises(DataError, match="`gaussian` needs none"):
        fetch("gaussian", tmp_path)
    with pytest.raises(UnknownName, match="Did you mean: mnist"):
        fetch("mnits", tmp_path)


def test_every_set_with_files_can_be_had():
    for name, entry in datasets.CATALOGUE.items():
        assert bool(entry.layouts) == (name in download.ORIGINS or name in download.BY_HAND)
    for name, origin in download.ORIGINS.items():
        assert set(origin.files) <= set(download.CHECKSUMS[name])
        assert origin.base.startswith("https://")
        assert origin.base.endswith("/")
        folders = [layout.folder for layout in datasets.CATALOGUE[name].layouts]
        assert origin.folder in folders


# -- archives ----------------------------------------------------------------------------------------------------------


def archive(entries: dict[str, bytes], link: str | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        if link is not None:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(entry)
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


ROWS = {f"cifar-100-binary/{part}.bin": bytes([k]) * (2 + 3072) for k, part in enumerate(("train", "test"))}


def offer(site: Site, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    site.files["cifar-100-binary.tar.gz"] = content
    site.answers = [well]
    known = {"cifar-100-binary.tar.gz": hashlib.md5(content).hexdigest()}
    monkeypatch.setitem(download.CHECKSUMS, "cifar100", known)


def test_an_archive_is_unpacked_and_removed(site, monkeypatch, tmp_path):
    offer(site, monkeypatch, archive(ROWS))
    assert [path.name for path in get(site, tmp_path, "cifar100")] == ["train.bin", "test.bin"]
    assert everything_in(tmp_path) == sorted(ROWS)
    assert datasets.load("cifar100", tmp_path).y.tolist() == [0, 1]
    get(site, tmp_path, "cifar100")
    assert len(site.ranges) == 1


def test_only_the_files_of_the_set_are_taken_out(site, monkeypatch, tmp_path):
    root = tmp_path / "data"
    evil = {"../evil": b"1", "/evil": b"2", "cifar-100-binary/../../evil": b"3", "cifar-100-binary/more": b"4"}
    offer(site, monkeypatch, archive(evil | ROWS, link="cifar-100-binary/link"))
    get(site, root, "cifar100")
    assert everything_in(tmp_path) == sorted(f"data/{name}" for name in ROWS)


def test_a_link_in_the_place_of_a_file_is_not_followed(site, monkeypatch, tmp_path):
    some = {"cifar-100-binary/test.bin": ROWS["cifar-100-binary/test.bin"]}
    offer(site, monkeypatch, archive(some, link="cifar-100-binary/train.bin"))
    with pytest.raises(DataError, match="must hold cifar-100-binary/train.bin. It does not."):
        get(site, tmp_path, "cifar100")
    assert not (tmp_path / "cifar-100-binary" / "train.bin").exists()


@pytest.mark.parametrize(
    "content",
    [b"no archive", archive(ROWS)[:-20], gzip.compress(b"no tar")],
    ids=["no archive", "cut short", "no tar inside"],
)
def test_an_archive_that_cannot_be_unpacked_leaves_nothing_half_written(site, monkeypatch, tmp_path, content):
    offer(site, monkeypatch, content)
    with pytest.raises(DataError, match="could not be unpacked|must hold"):
        get(site, tmp_path, "cifar100")
    for path in (tmp_path / "cifar-100-binary").glob("[!.]*"):
        assert path.read_bytes() == ROWS[f"cifar-100-binary/{path.name}"]


# -- several at once ---------------------------------------------------------------------------------------------------


def test_a_second_fetch_waits_and_then_has_nothing_to_do(ratings, tmp_path):
    """It begins while the file is half way here, and must neither write into it nor fetch it again."""
    ratings.answers = [well]
    second = threading.Thread(target=get, args=(ratings, tmp_path))

    def begin_another(*_: object) -> None:
        second.start()
        second.join(0.2)
        assert second.is_alive()

    get(ratings, tmp_path, progress=begin_another)
    second.join()
    assert len(ratings.ranges) == 1
    assert (tmp_path / FILE).read_bytes() == RATINGS


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_counts_from_where_the_transfer_goes_on(ratings, tmp_path):
    seen = []
    ratings.answers = [truncated, well]
    get(ratings, tmp_path, progress=lambda *call: seen.append(call))
    half = len(RATINGS) // 2
    assert seen == [("ratings.dat", half, len(RATINGS)), ("ratings.dat", len(RATINGS), len(RATINGS))]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with download.show_progress(console) as report:
        report("ratings.dat", 500_000, 1_000_000)
        report("ratings.dat", 1_000_000, 1_000_000)
    said = console.file.getvalue()
    assert "1.0/1.0 MB" in said if terminal else said == "fetching ratings.dat\n"


# -- checksums and the command line ------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, ["data", *arguments])


def test_verify_names_the_file_that_is_wrong(ratings, tmp_path):
    ratings.answers = [well]
    get(ratings, tmp_path)
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "hamlet.xml").write_text("<PLAY/>")
    assert verify(tmp_path) == {
        tmp_path / "shakespeare" / "hamlet.xml": "no checksum known", tmp_path / FILE: "right",
    }  # fmt: skip
    assert run("--verify", "--data", str(tmp_path)).exit_code == 0
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"one more")
    assert verify(tmp_path, "movietweetings") == {tmp_path / FILE: "WRONG"}
    result = run("--verify", "movietweetings", "--data", str(tmp_path))
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "ratings.dat" in result.stdout


@pytest.mark.skipif(not os.environ.get("ATOLL_DATA"), reason="reads real data sets: set ATOLL_DATA to their folder")
def test_real_files_are_right():
    verdicts = verify(Path(os.environ["ATOLL_DATA"]))
    assert set(verdicts.values()) == {"right"}


def test_download_from_the_command_line(ratings, tmp_path, monkeypatch):
    ratings.answers = [well]
    origin = download.Origin(ratings.base, "movietweetings", ("ratings.dat",))
    monkeypatch.setitem(download.ORIGINS, "movietweetings", origin)
    result = run("movietweetings", "--download", "--data", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert "fetching ratings.dat" in result.stderr
    assert "movietweetings/" in result.stdout
    assert (tmp_path / "new" / FILE).read_bytes() == RATINGS


def test_a_failed_download_exits_with_1(ratings, tmp_path, monkeypatch):
    ratings.answers = [refuse(404)]
    origin = download.Origin(ratings.base, "movietweetings", ("ratings.dat",))
    monkeypatch.setitem(download.ORIGINS, "movietweetings", origin)
    result = run("movietweetings", "--download", "--data", str(tmp_path))
    assert result.exit_code == 1
    assert "HTTP Error 404" in result.stderr


def test_the_list_of_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    result = run()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in datasets.names())
    assert f"folder: {tmp_path}" in result.stderr.replace("\n", "")
    assert "atoll data mnist --download" in run("mnist").stderr
    assert "archive.ics.uci.edu" in run("hapt").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("mnist --download", "A data folder must be given. Got none."),
        ("--verify", "A data folder must be given. Got none."),
        ("--download --data here", "`--download` must be given the name of a data set."),
        ("--data nowhere", "The data folder must exist. nowhere does not."),
        ("--verify --data nowhere", "The data folder must exist. nowhere does not."),
        ("minst", "Did you mean: mnist"),
        ("digits --download --data here", "`digits` needs none."),
        ("hapt --download --data here", "archive.ics.uci.edu"),
    ],
)
def test_bad_input(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert everything_in(tmp_path) == []
