"""A real browser, headless, and tabs in it. Tests of pages that import this are skipped where there is none.

With PENSTOCK_SCREENSHOTS=FOLDER they leave the pictures of the docs there.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra test-people")
_CHROMIUM: Final = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None, reason="no browser: install the Debian package chromium"
)
expect = playwright.expect
PATIENCE_S: Final = 240.0
"""Of a tab with what it waits for."""
NARROW: "Final[ViewportSize]" = {"width": 390, "height": 800}
WIDE: "Final[ViewportSize]" = {"width": 1200, "height": 1000}
_PICTURES: Final = os.environ.get("PENSTOCK_SCREENSHOTS")


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser, until the block ends."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM)
        try:
            yield browser
        finally:
            browser.close()


def open_tab(browser: "Browser", home: str, complaints: list[str], path: str = "") -> "Page":
    """A tab of a profile of its own at `home` + `path`, on a phone's width in the dark.

    complaints: gets what the page complains about, and each address outside `home` that it asks for.
    """
    tab = browser.new_context(viewport=NARROW, color_scheme="dark").new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request",
        lambda asked: None if asked.url.startswith((home, "blob:")) else complaints.append(asked.url),
    )
    tab.goto(f"{home}{path}")
    return tab


def check_look(tab: "Page", name: str) -> None:
    """Axe finds nothing and nothing is cut off: on a desk in the light, then on a phone in the dark.

    name: of the picture, taken of the desk.
    """
    tab.set_viewport_size(WIDE)
    tab.emulate_media(color_scheme="light")
    _check(tab, name)
    take_picture(tab, name)
    tab.set_viewport_size(NARROW)
    tab.emulate_media(color_scheme="dark")
    _check(tab, name)


def take_picture(tab: "Page", name: str, *, whole: bool = True) -> None:
    """Leave a picture of the tab where pictures are asked for."""
    if _PICTURES:
        tab.screenshot(path=Path(_PICTURES) / f"{name}.png", full_page=whole)


def violations(tab: "Page") -> list[tuple[str, str]]:
    """What axe finds in a tab as it looks now: the rule, and the first element that breaks it."""
    found = axe.Axe().run(tab).response["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found]


def _check(tab: "Page", name: str) -> None:
    assert violations(tab) == [], name
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (name, "too wide")
