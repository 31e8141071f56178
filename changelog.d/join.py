"""Join the fragments of this folder into CHANGELOG.md and delete them: `make changelog`, before a release.

A fragment is a file NAME.KIND.md, where KIND is added, changed, fixed or removed. It says in a sentence or a few what a
user notices of one change. So two changes that are made at once do not meet in one file.
"""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
CHANGELOG = FOLDER.parent / "CHANGELOG.md"
KINDS = ("added", "changed", "fixed", "removed")
NEWEST = "## [Unreleased]\n"


def list_fragments(folder: Path = FOLDER) -> list[Path]:
    """List the fragments in a folder; raise for one whose kind is unknown."""
    found = sorted(folder.glob("*.md"))
    for path in found:
        if kind_of(path) not in KINDS:
            raise ValueError(
                f"A fragment must be called NAME.KIND.md, with KIND one of {', '.join(KINDS)}. Got {path.name}."
            )
    return found


def kind_of(path: Path) -> str:
    """Return the kind of a fragment."""
    return Path(path.stem).suffix.removeprefix(".")


def join(changelog: str, fragments: Iterable[Path]) -> str:
    """Return the changelog with fragments on top of the newest entries of their kinds."""
    before, heading, rest = changelog.partition(NEWEST)
    newest, *older = re.split(r"^(?=## )", rest, flags=re.MULTILINE)
    for path in reversed([*fragments]):
        kind, text = f"### {kind_of(path).capitalize()}\n\n", " ".join(path.read_text(encoding="utf-8").split())
        if kind not in newest:
            newest = f"{newest.rstrip()}\n\n{kind}\n"
        newest = newest.replace(kind, f"{kind}- {text}\n", 1)
    return "".join([before, heading, newest, *older])


if __name__ == "__main__":
    parts = list_fragments()
    CHANGELOG.write_text(join(CHANGELOG.read_text(encoding="utf-8"), parts), encoding="utf-8")
    for part in parts:
        part.unlink()
