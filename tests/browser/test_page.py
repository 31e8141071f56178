"""The report of a comparison, in a real browser."""

import pytest

from atoll.comparison import compare
from atoll.recipe import Recipe


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of a small comparison."""
    comparison = compare(Recipe("digits", clients=4), ["local", "fedavg", "ditto"], seeds=2, rounds=2)
    path, *_ = comparison.save(tmp_path_factory.mktemp("report"))
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_offline_and_fits_its_window(page, report, width, scheme):
    shown = page(width, scheme)
    shown.goto(report)
    assert shown.locator("h1").count() == 1
    assert shown.locator("h2").count() >= 3
    for method in ("local", "fedavg", "ditto"):
        assert shown.locator("table", has_text=method).first.is_visible()
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
