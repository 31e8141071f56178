"""The BibTeX entries of what Atoll implements, in references.bib beside this file."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from atoll.kernel.errors import unknown


def bibtex(cites: str) -> str:
    """Return the entry with this key; BibTeX itself, which a user's own method may have, comes back as it is."""
    if not cites or cites.lstrip().startswith("@"):
        return cites
    entries = _entries()
    if cites not in entries:
        raise unknown("reference", cites, entries)
    return entries[cites]


@cache
def _entries() -> dict[str, str]:
    text = (resources.files("atoll.toolbox") / "references.bib").read_text()
    entries = (entry.strip() for entry in re.split(r"\n(?=@)", text))
    return {entry.partition("{")[2].partition(",")[0]: entry for entry in entries}
