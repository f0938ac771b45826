"""How soon the gateway's console is there, in a headless Chromium on the same machine.

Each figure counts from the beginning of the navigation: `loaded` until the page's load event has ended, as
navigation timing tells, `shown` until its heading is there, which its scripts make from the API's answers.
Cold is the first page of a browser and of a gateway that have just started. Warm is the median of pages that
are loaded again; no answer may be kept, so that all of their files are asked for again.
"""

import shutil
import statistics
from typing import TYPE_CHECKING, Final

from benchmarks.people import PASSWORD, gateway
from benchmarks.table import Cell, Options, Table

if TYPE_CHECKING:
    from playwright.sync_api import Page

LEAST_LOADS: Final = 20
AIM: Final = "below one second"
PLACES: Final = {"jobs": "Jobs", "feedback": "Feedback", "people": "People", "audit": "Audit"}
_SHOWN: Final = """heading => [...document.querySelectorAll("h2")].some((one) => one.textContent === heading)
    && performance.now()"""
_LOADED: Final = "() => performance.getEntriesByType('navigation')[0].loadEventEnd"


def table(options: Options) -> Table:
    """Return a row for each page, in milliseconds."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the tests' extra

    loads = max(options.repeat, LEAST_LOADS)
    with gateway() as (address, _, _), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page()
        tab.goto(f"http://{address}/", wait_until="load")
        rows: list[list[Cell]] = [
            ["sign in, cold", *_seen(tab, "Sign in")],
            ["sign in", *_again(tab, "Sign in", loads)],
        ]
        tab.get_by_label("Name", exact=True).fill("ada")
        tab.get_by_label("Password", exact=True).fill(PASSWORD)
        tab.get_by_role("button", name="Sign in").click()
        tab.get_by_role("heading", name="Jobs").wait_for()
        for place, heading in PLACES.items():
            tab.goto(f"http://{address}/#/alpha/{place}")
            rows.append([place, *_again(tab, heading, loads)])
        browser.close()
    return Table(
        title="The gateway's console in Chromium",
        columns=("page", "loaded ms", "shown ms"),
        rows=rows,
        note=f"aim: {AIM}. The median of {loads} loads.",
    )


def _again(tab: "Page", heading: str, loads: int) -> tuple[float, float]:
    """Return medians of as many loads of the page that a tab has."""
    found = []
    for _ in range(loads):
        tab.reload(wait_until="load")
        found.append(_seen(tab, heading))
    loaded, shown = zip(*found, strict=True)
    return statistics.median(loaded), statistics.median(shown)


def _seen(tab: "Page", heading: str) -> tuple[float, float]:
    """Return when the page of a tab was loaded, and when its heading was there, in ms."""
    shown = tab.wait_for_function(_SHOWN, arg=heading).json_value()
    return float(tab.evaluate(_LOADED)), float(shown)
