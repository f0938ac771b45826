"""The page of the chat in a real browser, headless: talked to by the keyboard, rated, looked after.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/chat.md there.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.registry.registry import Registry
from tests.support.chat.chat_gateway import ChatGateway
from tests.support.prompts.prompts_gateway import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra test-people")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: install the Debian package chromium"),
    pytest.mark.timeout(900),
]
PICTURES = os.environ.get("PENSTOCK_SCREENSHOTS")
NARROW: "ViewportSize" = {"width": 390, "height": 800}
WIDE: "ViewportSize" = {"width": 1100, "height": 1000}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser."""
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: "Browser", url: str, complaints: list[str]) -> "Page":
    """A tab on a phone's width in the dark, and what it complains about or asks for elsewhere."""
    tab = browser.new_context(viewport=NARROW, color_scheme="dark").new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request",
        lambda asked: None if asked.url.startswith((url, "blob:")) else complaints.append(asked.url),
    )
    tab.goto(f"{url}/chat")
    return tab


def say(tab: "Page", text: str, answers: int) -> None:
    """Say something by the keyboard alone; so many answers are there afterwards."""
    tab.get_by_label("Say something").focus()
    tab.keyboard.type(text)
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_role("button", name="I like this answer")).to_have_count(answers)


def check(tab: "Page", name: str) -> None:
    """Axe finds nothing, on a phone in the dark and on a desk in the light; no line is cut off."""
    for viewport, scheme in ((NARROW, "dark"), (WIDE, "light")):
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found = axe.Axe().run(tab).response["violations"]
        assert not found, (name, [(one["id"], one["nodes"][0]["html"]) for one in found])
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (name, viewport)
    if PICTURES:
        tab.screenshot(path=Path(PICTURES) / f"chat-{name}.png", full_page=True)


def test_two_people_talk_rate_and_one_looks_after_it(browser: "Browser", tmp_path: Path) -> None:
    """Text stays text; each sees their own; ratings are in the registry; the page complains of nothing."""
    complaints: list[str] = []
    with ChatGateway(tmp_path) as gateway:
        first, second = (opened(browser, gateway.url, complaints) for _ in range(2))
        say(first, "how are you <b>today</b>", 1)
        say(second, "hello", 1)
        playwright.expect(second.get_by_role("log")).not_to_contain_text("today")
        first.get_by_role("button", name="I like this answer").press("Enter")
        playwright.expect(first.get_by_text("Kept, and learned from.")).to_be_visible()
        second.get_by_role("button", name="I do not like this answer").press("Enter")
        first.get_by_text("Say more").press("Enter")
        first.get_by_role("button", name="safety: 4 of 5").press("Enter")
        playwright.expect(first.get_by_text("Kept: safety 4 of 5.")).to_be_visible()
        say(first, "tell me a joke", 2)
        first.get_by_role("button", name="Answer once more").press("Enter")
        first.get_by_role("button", name="The second is better").press("Enter")
        playwright.expect(first.get_by_text("Kept. The conversation goes on with")).to_be_visible()
        check(first, "talk")
        second.get_by_role("link", name="Look after").press("Enter")
        table = second.get_by_role("region", name="Satisfaction")
        playwright.expect(table).to_contain_text("cannot tell below 30 conversations")
        playwright.expect(second.locator("#state")).to_contain_text("No answer came from the fallback.")
        check(second, "look")
        first.get_by_role("link", name="Your data").press("Enter")
        playwright.expect(first.locator("#kept")).to_contain_text("3 ratings of yours are kept")
        check(first, "mine")
        first.get_by_role("button", name="Delete them").press("Enter")
        playwright.expect(first.locator("#kept")).to_contain_text("0 ratings of yours are kept")
        with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
            (kept,) = registry.ratings("default")
        assert (kept.rating.key, kept.rating.score) == ("thumb", -1.0)
        first.get_by_role("link", name="Talk").press("Enter")
        first.get_by_role("button", name="New conversation").press("Enter")
        playwright.expect(first.get_by_role("log")).to_be_empty()
        playwright.expect(first.locator("#notice")).to_be_empty()
    assert complaints == []
