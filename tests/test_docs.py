"""The documentation says what is so: every method has its page, links lead somewhere, code runs, options exist."""

import os
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.algorithms import list_methods
from atoll.kernel.errors import AtollError
from atoll.runtime.engines.measuring import one_thread_each

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
METHODS = list_methods()

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where cores are busy."""
    with one_thread_each():
        yield


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- one page per method -----------------------------------------------------------------------------------------------


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert {path.stem for path in (ROOT / "docs/algorithms").glob("*.md")} == set(METHODS)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    links = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)", index)}
    assert {path for path in DOCS if path.name != "index.md"} <= links


def test_what_pages_say_of_code_and_of_the_table_is_up_to_date() -> None:
    """`python benchmarks/methods_table.py --page` writes hyperparameters, what leaves, limits and the method's line."""
    for path, text in runpy.run_path(str(ROOT / "benchmarks/methods_table.py"))["write_pages"]().items():
        assert path.read_text() == text, named(path)


def test_fafi_on_other_data_is_not_called_as_released() -> None:
    # Its code deals samples to several clients, draws one view for a batch, and does not normalise test images.
    pages = [*(ROOT / "benchmarks").glob("oneshot*.py"), *(ROOT / "docs/algorithms").glob("*.md")]
    for page in [*pages, *(ROOT / "docs/guides").glob("*.md"), ROOT / "src/atoll/algorithms/fafi.py"]:
        assert not re.findall(
            r"(?<!not )FAFI,? as released|as released, FAFI|clean or as released", page.read_text()
        ), page


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


# -- code --------------------------------------------------------------------------------------------------------------


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(info.strip(), code) for info, code in FENCE.findall(page.read_text())]


ENGLISH = [page for page in DOCS if page.parent.name != "zh"]  # the others have the same code
RUNNABLE = [page for page in ENGLISH if any(info.startswith("python ") for info, _ in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=named)
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other; a block that raises gives the message shown after it."""
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    upcoming = iter(blocks(page))
    for info, code in upcoming:
        if info == "python run":
            exec(compile(code, named(page), "exec"), vars(module))
        elif info == "python raises":
            with pytest.raises(AtollError) as raised:
                exec(compile(code, named(page), "exec"), vars(module))
            following, message = next(upcoming)
            assert following == "text"
            assert f"{type(raised.value).__name__}: {raised.value}" == message.strip()


# -- Chinese ----------------------------------------------------------------------------------------------------------


TRANSLATIONS = runpy.run_path(str(ROOT / "docs/translations.py"))


@pytest.mark.parametrize("page", TRANSLATIONS["PAGES"])
def test_a_translation_has_the_code_of_its_original(page: str) -> None:
    """`python docs/translations.py` copies what has changed; a block that is new needs its place in the translation."""
    original = TRANSLATIONS["PAGES"][page]
    assert TRANSLATIONS["blocks"](page) == TRANSLATIONS["expected"](page), "run `python docs/translations.py`"
    text = (ROOT / page).read_text()
    assert re.search(r"[\u4e00-\u9fff]", FENCE.sub("", text))
    assert f"]({os.path.relpath(ROOT / original, (ROOT / page).parent)})" in text


@pytest.mark.parametrize("page", [page for page in TRANSLATIONS["PAGES"] if page.startswith("docs/")])
def test_a_translation_has_the_sections_of_its_original(page: str) -> None:
    both = [FENCE.sub("", (ROOT / one).read_text()) for one in (page, TRANSLATIONS["PAGES"][page])]
    ours, theirs = (re.findall(r"^## .+", text, flags=re.MULTILINE) for text in both)
    assert len(ours) == len(theirs), f"{ours}\n{theirs}"


def test_the_chinese_readme_counts_the_methods() -> None:
    text = (ROOT / "README.zh-CN.md").read_text()
    assert f"**{len(METHODS)} 种方法**" in text
    assert f"**单轮联邦学习**：{sum(method.one_shot for method in METHODS.values())} 种方法" in text


# -- the command line --------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """The `atoll ...` commands on a page, as words, in fences and between backticks."""
    text = page.read_text()
    shell = [code for info, code in FENCE.findall(text) if info.strip() in ("", "console", "sh")]
    lines = [line.strip().removeprefix("$ ") for code in shell for line in code.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(atoll [^`\n]+)`", FENCE.sub("", text))
    for line in lines:
        if re.match(r"atoll [a-z]", line):
            yield shlex.split(line, comments=True)[1:]


WITH_COMMANDS = [page for page in PAGES if any(commands(page))]


def options_of(command: Any, words: Sequence[str] = ()) -> set[str]:
    """The options of a command; of a group, those of the command that the words name, or of all."""
    inner = getattr(command, "commands", {})
    inner = {words[0]: inner[words[0]]} if words and words[0] in inner else inner
    own = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    return own.union(*map(options_of, inner.values()))


def test_options_named_alone_exist() -> None:
    import typer.main

    from atoll.cli import app

    options = set().union(*map(options_of, typer.main.get_command(app).commands.values()))  # type: ignore[attr-defined]
    for page in PAGES:
        for option in re.findall(r"`(--[a-z0-9-]+)", FENCE.sub("", page.read_text())):
            assert option in options, f"{named(page)}: {option}"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=named)
def test_commands_and_their_options_exist(page: Path) -> None:
    import typer.main

    from atoll.cli import app

    group = typer.main.get_command(app)
    for name, *words in commands(page):
        assert name in group.commands, f"atoll {name}"  # type: ignore[attr-defined]
        options = options_of(group.commands[name], words) | {"--help"}  # type: ignore[attr-defined]
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"atoll {name} {word}"
