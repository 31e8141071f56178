"""The documentation as a site: built without a warning, with every page, working from files without a network."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        made = page.relative_to(DOCS).with_suffix(".html")
        assert (site / made).exists(), made
    linked = {link for page in ("index.html", "algorithms/ditto.html") for link in links_in(site, page)}
    missing = [
        page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).with_suffix(".html").as_posix() not in linked
    ]
    assert not missing
    assert "Reading the report" in home


def links_in(site: Path, page: str) -> set[str]:
    found = re.findall(r'href="([^"#]+\.html)', (site / page).read_text())
    return {os.path.normpath(Path(page).parent / link) for link in found}


def test_code_outside_the_documentation_has_a_page(site: Path) -> None:
    source = site / "source/src/atoll/algorithms/ditto.py.html"
    assert "A personal model per client" in source.read_text()
    assert "source/src/atoll/algorithms/ditto.py.html" in links_in(site, "algorithms/ditto.html")
    assert "Which method for these clients?" in (site / "source/examples/compare.ipynb.html").read_text()


def test_the_reference_holds_the_public_names(site: Path) -> None:
    import atoll

    pages = " ".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for name in atoll.__all__:
        home = getattr(atoll, name)
        assert f'id="{home.__module__}.{name}"' in pages, f"{name} must stand on a page of docs/reference"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="(https?:[^"]+)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preload|icon|preconnect)"[^>]*href="(https?:[^"]+)"', text)
        assert not loaded, page


def test_fences_that_tests_run_are_code(site: Path) -> None:
    assert not [page for page in site.rglob("*.html") if "```python" in page.read_text()]


def test_text_for_the_search_is_there(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    assert index["config"]["lang"] == ["en", "zh"]
    assert not [entry for entry in index["docs"] if entry["location"].startswith("source/")]


@pytest.mark.parametrize(
    ("words", "found"),
    [("proximal", "proximal"), ("personal model", "model"), ("微调分类头", "单轮（one-shot）联邦学习")],
)
def test_search_works_in_files_without_a_network(site: Path, page: Callable[..., Page], words: str, found: str) -> None:
    opened = page()
    opened.goto((site / "index.html").as_uri())
    opened.click("input.md-search__input")
    opened.wait_for_function("!/nitializ/.test(document.querySelector('.md-search-result__meta').textContent)")
    opened.fill("input.md-search__input", words)
    opened.keyboard.press("End")  # the theme waits for a key
    opened.wait_for_selector(".md-search-result__item", state="attached")
    assert found in opened.locator(".md-search-result__list").inner_text().lower()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_is_wide_enough(site: Path, page: Callable[..., Page], scheme: str) -> None:
    opened = page(390, scheme)
    for name in ("index", "guides/choose", "reference/running", "results/personalized"):
        opened.goto((site / f"{name}.html").as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
