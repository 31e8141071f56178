"""Hooks of the site. Its navigation is index.md; files outside docs/ that a page links to become pages of their own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```[^\n]*\n.*?^```)$", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from index.md."""
    config.nav = read_navigation((DOCS / "index.md").read_text(encoding="utf-8"))
    return config


def read_navigation(index: str) -> list[Any]:
    """Return the sections of the index with the pages that each lists; of a table, the links of its rows."""
    sections: list[Any] = [{"Home": "index.md"}]
    for part in re.split(r"^(?=\*\*)", index, flags=re.MULTILINE)[1:]:
        name = re.match(r"\*\*(.+?)\*\*", part)
        links = re.findall(r"\[([^\]]+)\]\(([^)#]+\.md)\)", part)
        pages = [{title.replace("`", ""): path} for title, path in links if not path.startswith("..")]
        if name and pages:
            sections.append({name[1]: pages})
    return sections


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make a page of every file outside docs/ that a page links to, and of those that these link to."""
    waiting = [target for file in files.documentation_pages() for target in list_outside(file)]
    made: set[Path] = set()
    while waiting:
        target = waiting.pop()
        if target in made or not target.exists():  # mkdocs names a link that leads nowhere
            continue
        made.add(target)
        file = File.generated(config, page_of(target), content=write_page(target))
        files.append(file)
        if target.suffix == ".md":
            waiting += find_targets(target.read_text(encoding="utf-8"), target.parent)
    return files


def list_outside(file: File) -> list[Path]:
    """List what a page of docs/ links to outside docs/."""
    path = Path(file.abs_src_path or "")
    return find_targets(file.content_string, path.parent) if path.is_relative_to(DOCS) else []


def find_targets(text: str, folder: Path) -> list[Path]:
    """Find the files outside docs/ that a text links to, which stands in this folder."""
    found = {(folder / link).resolve() for link, _ in LINK.findall(FENCE.sub("", text))}
    return sorted(target for target in found if target.is_relative_to(ROOT) and not target.is_relative_to(DOCS))


def page_of(target: Path) -> str:
    """Return where the page of a file outside docs/ lies."""
    return f"source/{target.relative_to(ROOT).as_posix()}.md"


def write_page(target: Path) -> str:
    """Write the page of a file: text as it is, a program in a fence, of a folder the names in it."""
    name = target.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\nhide:\n  - navigation\ntitle: {name}\n---\n\n"
    if target.is_dir():
        names = sorted(entry.name for entry in target.iterdir() if not entry.name.startswith(("_", ".")))
        return f"{head}# {name}\n\n" + "\n".join(f"- `{entry}`" for entry in names) + "\n"
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return head + text
    if target.suffix == ".ipynb":
        return f"{head}{write_cells(text)}"
    return f"{head}# {name}\n\n~~~~{LANGUAGES.get(target.suffix, 'text')}\n{text}\n~~~~\n"


def write_cells(text: str) -> str:
    """Write the cells of a notebook one under the other."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links that leave docs/ to the pages of their files; leave out what tests read in the heads of fences."""
    own = Path(page.file.src_uri)
    inside = DOCS / own if own.parts[0] != "source" else ROOT / Path(*own.parts[1:]).with_suffix("")

    def lead(match: re.Match[str]) -> str:
        target, anchor = (inside.parent / match[1]).resolve(), match[2] or ""
        if target.is_relative_to(DOCS):
            to = target.relative_to(DOCS).as_posix()
        elif target.is_relative_to(ROOT) and target.exists():
            to = page_of(target)
        else:
            return match[0]
        return os.path.relpath(to, own.parent.as_posix()) + anchor

    parts = FENCE.split(re.sub(r"^```python (?:run|raises)$", "```python", markdown, flags=re.MULTILINE))
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)
