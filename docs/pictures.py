"""Take the pictures of a report for the README, light and dark.

python docs/pictures.py runs/COMPARISON/report.html
"""

import sys
from pathlib import Path
from shutil import which

from playwright.sync_api import sync_playwright

ASSETS = Path(__file__).parent / "assets"


def main(report: Path) -> None:
    """Open the report in Chromium, and keep the top of the page."""
    browser = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = opened.new_context(viewport={"width": 1100, "height": 760}, color_scheme=scheme).new_page()
            page.goto(report.resolve().as_uri())
            page.screenshot(path=ASSETS / f"report-{scheme}.png")
        opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
