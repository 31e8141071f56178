"""The report of a comparison, in a real browser: offline, light and dark, on a desk and on a phone, with and without
its script."""

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from atoll.data.recipe import Recipe
from atoll.data.task import Training
from atoll.experiments.comparison import Comparison, compare
from atoll.records.report import Report

METHODS = ["local", "fedavg", "ditto"]
CONTRAST = """selector => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  return [...document.querySelectorAll(selector)].filter(one => one.textContent.trim()).map(one => {
    const style = getComputedStyle(one);
    const text = one.ownerSVGElement ? style.fill : style.color;
    const [low, high] = [light(text), light(behind(one))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison with its runs and its report."""
    folder = tmp_path_factory.mktemp("report")
    compare(Recipe("digits", clients=8), METHODS, seeds=2, rounds=2, folder=folder).save(folder)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    """The address of the report."""
    return (folder / "report.html").as_uri()


def on(shown: Page, client: str) -> int:
    """How many marks of the client are highlighted."""
    return shown.locator(f'.on[data-client="{client}"]').count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_offline_and_fits_its_window(page, report, width, scheme):
    shown = page(width, scheme)
    shown.goto(report)
    assert shown.locator("h1").count() == 1
    assert shown.locator("h2").count() >= 10
    for method in METHODS:
        assert shown.locator("table", has_text=method).first.is_visible()
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(page, report, scheme):
    shown = page(1280, scheme)
    shown.goto(report)
    behind = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    darkness = sum(map(int, re.findall(r"\d+", behind)[:3])) / 3
    assert darkness > 240 if scheme == "light" else darkness < 40
    for text in ("p, li, a, h1, h2, h3, summary, figcaption", "th, td, caption span", "pre", "svg text"):
        found = shown.evaluate(CONTRAST, text)
        assert found
        assert min(found) >= 4.5, text


def test_on_a_phone_figures_are_drawn_for_it(page, report):
    shown = page(390)
    shown.goto(report)
    figure = shown.locator("figure .narrow svg").first
    assert figure.is_visible()
    assert not shown.locator("figure .wide").first.is_visible()
    size = figure.evaluate("one => one.getBoundingClientRect().width / one.viewBox.baseVal.width * 12.5")
    assert size >= 11  # pixels of its text


def test_pointing_at_a_client_shows_its_numbers_and_marks_it_everywhere(page, report):
    shown = page()
    shown.goto(report)
    tip = shown.locator("#tip")
    assert not tip.is_visible()
    bar = shown.locator('.grid [data-method="2"] g[data-client]').first
    client = bar.get_attribute("data-client")
    bar.locator(".hit").hover(force=True)  # whatever of the client is in the middle
    words = tip.inner_text()
    row = shown.locator(f'tr[data-client="{client}"]')
    assert f"Client {client}" in words
    assert "samples" in words
    for cell in row.locator("td[data-method]").all_inner_texts():
        assert cell.removeprefix("▼ ") in words
    marked = shown.locator(f'[data-client="{client}"]').count()
    assert marked >= 7  # two bars, three dots, a column of the partition, a row of the table
    assert on(shown, client) == marked
    shown.mouse.move(2, 2)
    assert not tip.is_visible()
    assert on(shown, client) == 0


def test_a_client_can_be_reached_by_keyboard(page, report):
    shown = page()
    shown.goto(report)
    figure = shown.locator(".grid svg").first
    order = figure.locator("g[data-client]").evaluate_all("all => all.map(one => one.dataset.client)")
    figure.focus()
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowRight")
    assert f"Client {order[1]}" in shown.locator("#tip").inner_text()
    assert on(shown, order[1]) > 1
    shown.keyboard.press("ArrowLeft")
    assert f"Client {order[0]}" in shown.locator("#tip").inner_text()
    shown.keyboard.press("Escape")
    assert not shown.locator("#tip").is_visible()


def test_a_tap_shows_a_client_until_the_next_tap(browser: Browser, report):
    with browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as context:
        shown = context.new_page()
        shown.goto(report)
        shown.locator(".grid g[data-client] .hit").first.tap(force=True)
        assert shown.locator("#tip").is_visible()
        shown.locator("h1").tap()
        assert not shown.locator("#tip").is_visible()


def test_the_legend_hides_a_method_everywhere(page, report):
    shown = page()
    shown.goto(report)
    parts = shown.locator('[data-method="2"]')
    entry = shown.get_by_role("button", name="ditto")
    before = parts.filter(visible=True).count()
    assert before > 20
    assert entry.get_attribute("aria-pressed") == "true"
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert parts.filter(visible=True).count() == 0
    assert shown.locator('[data-method="1"]').filter(visible=True).count() > 20
    entry.press("Enter")
    assert entry.get_attribute("aria-pressed") == "true"
    assert parts.filter(visible=True).count() == before


def test_everything_is_there_without_a_script(browser: Browser, report):
    with browser.new_context(java_script_enabled=False, offline=True) as context:
        shown = context.new_page()
        shown.goto(report)
        assert shown.get_by_text("helps").first.is_visible()
        assert shown.locator("figure svg").filter(visible=True).count() >= 6
        assert shown.locator("tr[data-client]").count() == 8
        shown.locator("details summary").first.click()
        assert shown.get_by_text("Jain of errors").is_visible()
        assert not shown.locator("#tip").is_visible()


def test_printing_opens_what_is_folded(page, report):
    shown = page()
    shown.goto(report)
    assert shown.locator("details:not([open])").count() > 0
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("details:not([open])").count() == 0


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of a method that finds clusters."""
    folder = tmp_path_factory.mktemp("clusters")
    recipe = Recipe("digits", clients=6, partition="iid+rotation:2", training=Training(lr=0.1))
    found = compare(recipe, ["flhc:rounds_before=1,clusters=2"], seeds=1, rounds=2, folder=folder)
    return found.save(folder)["report"].as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_clusters_are_drawn_and_a_client_of_them_can_be_pointed_at(page, grouped, width, scheme):
    shown = page(width, scheme)
    shown.goto(grouped)
    figure = shown.locator(f".clusters {'.narrow' if width == 390 else '.wide'} svg")
    assert figure.is_visible()
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    branches = figure.locator(".branch").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
    assert len({background, *branches}) == 1 + len(branches) >= 3  # each cluster and what joins them in its own colour
    assert min(shown.evaluate(CONTRAST, ".clusters p, .clusters td, .clusters text")) >= 4.5
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    hit = figure.locator(".hit").first
    hit.scroll_into_view_if_needed()
    hit.hover(force=True)
    words = shown.locator("#tip").inner_text()
    assert re.search(r"is in cluster [01], of planted group [01]", words)


def test_what_is_incomplete_is_said_at_the_top(page, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "cut")
    runs = sorted(path.parent for path in (tmp_path / "cut").glob("*/config.json"))
    shutil.rmtree(runs[0] / "checkpoints")  # killed in its second round
    for name in ("metrics.jsonl", "ledger.jsonl"):
        lines = (runs[0] / name).read_text().splitlines(keepends=True)
        (runs[0] / name).write_text("".join(lines[: len(lines) // 2]))
    begun = Comparison.of_runs([Report.read(run) for run in runs]).save(tmp_path)["report"]
    shown = page(390)
    shown.goto(begun.as_uri())
    banner = shown.get_by_role("alert")
    assert banner.is_visible()
    assert "is incomplete: 1 of 2 rounds" in banner.inner_text()
    assert banner.bounding_box()["y"] < 200
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
