"""Give the Chinese pages the code of the English ones: `python docs/translations.py`. A test holds them equal."""

import re
import sys
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```[^\n]*\n.*?^```$", flags=re.MULTILINE | re.DOTALL)
PAGES = {  # Chinese: English
    "README.zh-CN.md": "README.md",
    "docs/zh/start.md": "docs/start.md",
    "docs/zh/own-data.md": "docs/guides/own-data.md",
    "docs/zh/one-shot.md": "docs/guides/one-shot.md",
    "docs/zh/notes-table.md": "docs/results/notes-table.md",
    "docs/zh/notes.md": "docs/concepts/notes.md",
}
SHORTER = ("README.zh-CN.md",)  # may leave blocks out


def blocks(page: str) -> list[str]:
    """Return the fenced blocks of a page."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


def expected(page: str) -> list[str]:
    """Return the blocks that a translation must have: those of its original; of a shorter one, the nearest of them."""
    ours, theirs = blocks(page), blocks(PAGES[page])
    if page not in SHORTER:
        return theirs
    return [max(theirs, key=lambda other, own=own: SequenceMatcher(None, own, other).ratio()) for own in ours]


def main() -> int:
    """Replace the blocks of every translation, one by one; return 1 if a page has not as many as its original."""
    failed = 0
    for page, original in PAGES.items():
        ours, theirs = blocks(page), expected(page)
        if len(ours) != len(theirs):
            sys.stderr.write(f"{page} has {len(ours)} blocks of code, {original} has {len(theirs)}\n")
            failed = 1
            continue
        path, upcoming = ROOT / page, iter(theirs)
        path.write_text(FENCE.sub(lambda _, left=upcoming: next(left), path.read_text("utf-8")), "utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
