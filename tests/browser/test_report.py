"""The report of a comparison, in a real browser: offline, light and dark, on a desk and on a phone, with and without
its script."""

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from atoll.data.recipe import Recipe
from atoll.data.task import Task, Training
from atoll.experiments.comparison import Comparison, compare
from atoll.federation.report import Report
from atoll.kernel.randomness import generator

METHODS = ["local", "fedavg", "ditto"]
CONTRAST = """selector => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = colours => {
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {  // one over the other, as some are translucent
    const found = [];
    for (let at = one; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return found;
  };
  return [...document.querySelectorAll(selector)].filter(one => one.textContent.trim()).map(one => {
    const style = getComputedStyle(one);
    const text = one.ownerSVGElement ? style.fill : style.color;
    const [low, high] = [light([text]), light(behind(one))].sort((a, b) => a - b);
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
        assert shown.locator("table.heat tr[data-client]").count() == 8
        assert shown.locator("table:not(.heat) tr[data-client]").count() == 8
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


CUT = """() => [...document.querySelectorAll("svg text")].filter(text => {
  const mine = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
  return mine.width && frame.width && (mine.left < frame.left - 1 || mine.right > frame.right + 1
    || mine.top < frame.top - 1 || mine.bottom > frame.bottom + 1);
}).map(text => text.textContent)"""
SITES = ["Charité Universitätsmedizin Berlin, Campus Mitte", "Ulm", "Hôpital Européen Georges-Pompidou"]


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report whose 35 clients, classes and methods have long names."""
    draw = generator(0, "long names")
    classes = ["walking", "sitting down on a chair", "climbing stairs"]
    data = {
        f"{SITES[k % 3]} {k}": {"x": draw.normal(size=(24, 3)), "y": draw.permutation(classes * 8).tolist()}
        for k in range(35)
    }
    methods = ["local", "fedavg", "ditto:lam=0.1,epochs=2,personal_epochs=3", "fedper+prox:mu=0.01", "fedora"]
    found = compare(Task.own(data, target="y"), methods, seeds=1, rounds=2, metric="f1", progress=False)
    return found.save(tmp_path_factory.mktemp("long"))["report"].as_uri()


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_are_not_cut_off(page, long_names, width):
    shown = page(width)
    shown.goto(long_names)
    assert shown.evaluate(CUT) == []
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert any(one.is_visible() for one in shown.get_by_text(f"{SITES[0]} 0").all())
    box = shown.get_by_role("region", name="Gains of clients with each method")
    assert box.locator("tr[data-client]").count() == 35
    assert box.bounding_box()["height"] < 700


@pytest.mark.parametrize("kind", ["deuteranopia", "protanopia", "tritanopia", "achromatopsia"])
def test_gains_and_losses_differ_for_all_eyes(page, long_names, kind):
    shown = page()
    shown.goto(long_names)
    shown.context.new_cdp_session(shown).send("Emulation.setEmulatedVisionDeficiency", {"type": kind})
    signs = shown.locator("table.heat").first.locator("td[class*=up], td[class*=down]")
    for cell in signs.all()[:40]:  # the words say it, whatever the colour
        gains = "up" in cell.get_attribute("class")
        assert cell.inner_text().removeprefix("▼ ")[0] == ("+" if gains else "-")
    shapes = shown.locator(".legend path.dot").evaluate_all("all => all.map(one => one.getAttribute('d'))")
    assert len({*shapes}) == len(shapes) == 5


def test_a_screen_reader_hears_what_figures_and_tables_are(page, long_names):
    shown = page()
    shown.goto(long_names)
    figures = shown.locator("figure svg")
    named = figures.evaluate_all("all => all.map(one => one.getAttribute('role') === 'img' && one.ariaLabel)")
    assert all(named)
    assert shown.locator("[role=region]:not([aria-label])").count() == 0
    assert shown.locator("table th:not([scope])").count() == 0
