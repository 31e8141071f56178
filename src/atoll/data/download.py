"""Fetching data sets from where they are published, and checking files against known checksums.

A file is written beside its place under a hidden name, continued there if a transfer ends early, checked, and only then
given its name: a file that has its name is complete. Two processes that fetch the same file take turns.
"""

import contextlib
import hashlib
import os
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from shutil import copyfileobj
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from atoll.data.datasets import CIFAR10_STEMS, CIFAR100_STEMS, IDX_STEMS, entry_of, names, require_folder
from atoll.kernel.errors import DataError

Report = Callable[[str, int, int | None], None]  # (file, bytes so far, bytes in all if known)
Verdict = Literal["right", "WRONG", "no checksum known"]

TRIES = 4
PATIENCE = 30.0  # seconds without a byte after which a connection counts as dead
BLOCK = 1 << 18
WORTH_ANOTHER_TRY = (408, 425, 429)  # refusals that pass, besides the server's own errors from 500 on

IDX_FILES = tuple(f"{stem}.gz" for stem in IDX_STEMS)


@dataclass(frozen=True)
class Origin:
    """The place where a data set is published: files below `base`, and the folder they go to.

    Of an archive, only the `members` of that name are taken out.
    """

    base: str
    folder: str
    files: Sequence[str]
    members: Sequence[str] = ()


ORIGINS: dict[str, Origin] = {
    "mnist": Origin("https://ossci-datasets.s3.amazonaws.com/mnist/", "mnist", IDX_FILES),
    "fashion-mnist": Origin(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "fashion-mnist",
        IDX_FILES,
    ),
    "cifar10": Origin(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-10-batches-bin",
        ("cifar-10-binary.tar.gz",),
        [f"{stem}.bin" for stem in CIFAR10_STEMS],
    ),
    "cifar100": Origin(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-100-binary",
        ("cifar-100-binary.tar.gz",),
        [f"{stem}.bin" for stem in CIFAR100_STEMS],
    ),
    "movietweetings": Origin(
        "https://raw.githubusercontent.com/sidooms/MovieTweetings/44c525d0c766944910686c60697203cda39305d6/snapshots/100K/",
        "movietweetings",
        ("ratings.dat",),
    ),
}
# Data sets that are made of the files of another one.
SAME_FILES = {
    "rotated-mnist": "mnist",
    "rotated-fashion-mnist": "fashion-mnist",
    "movietweetings-5core": "movietweetings",
    "movietweetings-5core-leak": "movietweetings",
    "movietweetings-10core": "movietweetings",
    "movielens-100k-leak": "movielens-100k",
}
ORIGINS |= {name: ORIGINS[source] for name, source in SAME_FILES.items() if source in ORIGINS}

# Published without a checksum, or made by a program of their own.
BY_HAND: dict[str, str] = {
    "hapt": "unpack `HAPT Data Set.zip` of https://archive.ics.uci.edu/dataset/341 in the data folder.",
    "shakespeare": "put the plays of https://www.ibiblio.org/xml/examples/shakespeare/ (*.xml) into shakespeare/.",
    "femnist": "make it with LEAF (https://github.com/TalwalkarLab/leaf) and put data/all_data/*.json into femnist/.",
    "movielens-100k": "it may not be passed on. Put `u.data` of https://grouplens.org/datasets/movielens/100k/ into "
    "ml-100k/ of the data folder, or the wheel that holds it, which is not installed: "
    "pip download --no-deps recbole==1.2.1 --dest FOLDER/ml-100k",
}
BY_HAND |= {name: BY_HAND[source] for name, source in SAME_FILES.items() if source in BY_HAND}

# SHA-256, or, in 32 digits, the MD5 that is published with the file.
CHECKSUMS: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        "data_batch_1.npz": "cafdf641cc4caef53784fe564423e1ff651bc0a21f716ef5718122f563fe3bc3",
        "data_batch_2.npz": "a5c9e71bff0d77cf1d92f10c872af4bed726f922e9656456cafacb3ea891ed5c",
        "data_batch_3.npz": "aa8823676d358ed83035491303b1206dd5f0b4fde770becfc2d00ee3aae107fb",
        "data_batch_4.npz": "936b86fda7d0bb0a40f931811160d7078d4e38e0b51bb66c037a734d6d920d55",
        "data_batch_5.npz": "ac499db9f6e77f7786b3cb9380721eba8d39d5023dcec0f2839c6221b751020e",
        "test_batch.npz": "9f11d3ef3f004ba2fa32df4cdd2922f5ec3737478c7b7da62f8ce3114183d5b2",
    },
    "cifar100": {
        "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
        "train.npz": "9282e62925d0fe8c1c3e74e25beaf62fbc23fa36fa3047e2e981e84db272a580",
        "test.npz": "9661e35066a4aff9ee39734fd2a46cb638aa7fc450d1cc6ae11103a04a165e8d",
    },
    "hapt": {"hapt.npz": "07fb45fa84ce2d6f552de47bb1970fa7ea94f46065a09c4b4cf9cfca59aa2266"},
    "shakespeare": {
        "shakespeare_by_role.npz": "541947243880e708346ce56050c1a4d1dc864ab2773704fb5d6929004d15b20f",
    },
    "movielens-100k": {
        "recbole-1.2.1-py3-none-any.whl": "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
    },
    "movietweetings": {
        "ratings.dat": "c0dd868c2632d10002ebc928ddc5345f33adeaa59eca52c2941c26a2c5e36fd6",
        "movietweetings_100k.npz": "48b9340a16af7e06a93b9dddef881095c68f10a923208e547a2af9f57a215fb8",
    },
}
CHECKSUMS |= {name: CHECKSUMS[source] for name, source in SAME_FILES.items() if source in CHECKSUMS}


def fetch(
    name: str,
    root: Path,
    *,
    base: str | None = None,
    tries: int = TRIES,
    pause: float = 1.0,
    progress: Report = lambda *_: None,
) -> list[Path]:
    """Fetch a data set's files into `root`, from `base` if it is given; files that are complete are kept.

    A transfer that fails is tried again up to `tries` times, after `pause` seconds, then twice as many, and so on.
    """
    origin, (name, _) = origin_of(name), entry_of(name)
    folder = root / origin.folder
    had: list[Path] = []
    with _alone_in(folder):
        for file in origin.files:
            made = [folder / member for member in origin.members] or [folder / file]
            if any(check(name, path) == "WRONG" for path in made):
                part = _partial_path(folder / file)
                _obtain(f"{base or origin.base}{file}", part, CHECKSUMS[name][file], tries, pause, progress)
                if origin.members:
                    _unpack(part, folder, origin.members)
                    part.unlink()
                else:
                    _place(part, folder / file)
            had += made
    return had


def origin_of(name: str) -> Origin:
    """Return where a data set is fetched from; raise with a hint how to get it if Atoll cannot fetch it."""
    name, entry = entry_of(name)
    if name in ORIGINS:
        return ORIGINS[name]
    if not entry.layouts:
        raise DataError(f"Only a data set that has files can be fetched. `{name}` needs none.")
    raise DataError(f"`{name}` cannot be fetched by Atoll.", hint=BY_HAND[name])


def how_to_get(name: str) -> str:
    """Say how to get a data set's files."""
    name, _ = entry_of(name)
    return f"atoll data {name} --download" if name in ORIGINS else BY_HAND[name]


# -- checksums ---------------------------------------------------------------------------------------------------------


def verify(root: Path, name: str | None = None) -> dict[Path, Verdict]:
    """Check every file that is there of a data set, or of all, in every layout; return the verdicts."""
    chosen = [one for one in names() if one not in SAME_FILES] if name is None else [entry_of(name)[0]]
    root = require_folder(root)
    layouts = [(one, layout) for one in chosen for layout in entry_of(one)[1].layouts]
    return {path: check(one, path) for one, layout in layouts for path in layout.search(root)[0]}


def check(name: str, path: Path) -> Verdict:
    """Compare a file with its checksum; a missing file is wrong."""
    if not path.is_file():
        return "WRONG"
    expected = CHECKSUMS.get(name, {}).get(path.name)
    if expected is None:
        return "no checksum known"
    return "right" if digest(path, expected) == expected else "WRONG"


def digest(path: Path, like: str) -> str:
    """Return the checksum of a file, by the same rule as the checksum `like`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5" if len(like) == 32 else "sha256").hexdigest()


# -- one file ----------------------------------------------------------------------------------------------------------


def _obtain(url: str, part: Path, expected: str, tries: int, pause: float, progress: Report) -> None:
    """Fetch the whole of `url` into `part` and check it."""
    problem: Exception = OSError("no try was allowed")
    for attempt in range(tries):
        if part.exists() and digest(part, expected) == expected:
            return  # an earlier call had it all
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            _transfer(url, part, progress)
        except HTTPError as error:
            error.close()
            problem = error
            if error.code == 416:  # there is no more to send, and yet it is not right
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in WORTH_ANOTHER_TRY:
                break
        except (OSError, HTTPException) as error:
            problem = error
        else:
            found = digest(part, expected)
            if found == expected:
                return
            problem = OSError(f"its checksum must be {expected}, and is {found}")
            part.unlink()
    kept = "what has arrived is kept and continued at the next try" if part.exists() else "try again later"
    raise DataError(
        f"{url} could not be fetched: {str(problem) or type(problem).__name__}.",
        hint=f"{kept}, or put the file into {part.parent} yourself.",
    ) from problem


def _transfer(url: str, part: Path, progress: Report) -> None:
    """Append the bytes that are missing; a server that cannot continue sends everything again."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "atoll", **({"Range": f"bytes={have}-"} if have else {})})
    with urlopen(request, timeout=PATIENCE) as answer:
        if answer.status != 206:
            have = 0
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise OSError("the server sent another range than it was asked for")
        total = None if answer.length is None else have + answer.length
        with part.open("ab" if have else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                progress(url.rpartition("/")[2], have, total)
    if total is not None and have < total:
        raise OSError(f"the connection ended after {have} of {total} bytes")


def _partial_path(target: Path) -> Path:
    """Return where the bytes of a file wait for the rest."""
    return target.with_name(f".{target.name}.part")


def _place(part: Path, target: Path) -> None:
    """Give a complete file its name; it survives a crash."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _unpack(archive: Path, folder: Path, members: Sequence[str]) -> None:
    """Take the named files out of a tar.gz; nothing else in it is written, whatever its name."""
    missing = {f"{folder.name}/{member}": member for member in members}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                source = tar.extractfile(entry) if entry.isfile() and entry.name in missing else None
                if source is not None:
                    target = folder / missing.pop(entry.name)
                    with _partial_path(target).open("wb") as file:
                        copyfileobj(source, file)
                    _place(_partial_path(target), target)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} could not be unpacked: {error}") from error
    if missing:
        raise DataError(f"{archive.name} must hold {', '.join(missing)}. It does not.")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and hold it alone; wait while another process fetches into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            yield
    except OSError as error:
        raise DataError(f"{folder} could not be written: {error}", hint="choose another data folder.") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where a forked process holds it too
        os.close(handle)


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def show_progress(console: Console) -> Iterator[Report]:
    """Show a bar for each file on a terminal, otherwise a line for each."""
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=28), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
                if not console.is_terminal:
                    console.print(f"fetching {file}", highlight=False)
            bar.update(tasks[file], completed=done, total=total)

        yield report
