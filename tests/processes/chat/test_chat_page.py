"""The page of the chat in a real browser, headless: talked to by the keyboard, rated, looked after.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/chat.md there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.registry.registry import Registry
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.chat.chat_gateway import ChatGateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser."""
    with chromium() as started:
        yield started


def say(tab: "Page", text: str, answers: int) -> None:
    """Say something by the keyboard alone; so many answers are there afterwards."""
    tab.get_by_label("Say something").focus()
    tab.keyboard.type(text)
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("button", name="I like this answer")).to_have_count(answers)


def test_two_people_talk_rate_and_one_looks_after_it(browser: "Browser", tmp_path: Path) -> None:
    """Text stays text; each sees their own; ratings are in the registry; the page complains of nothing."""
    complaints: list[str] = []
    with ChatGateway(tmp_path) as gateway:
        first, second = (open_tab(browser, gateway.url, complaints, "/chat") for _ in range(2))
        say(first, "how are you <b>today</b>", 1)
        say(second, "hello", 1)
        expect(second.get_by_role("log")).not_to_contain_text("today")
        first.get_by_role("button", name="I like this answer").press("Enter")
        expect(first.get_by_text("Kept, and learned from.")).to_be_visible()
        second.get_by_role("button", name="I do not like this answer").press("Enter")
        first.get_by_text("Say more").press("Enter")
        first.get_by_role("button", name="safety: 4 of 5").press("Enter")
        expect(first.get_by_text("Kept: safety 4 of 5.")).to_be_visible()
        say(first, "tell me a joke", 2)
        first.get_by_role("button", name="Answer once more").press("Enter")
        first.get_by_role("button", name="The second is better").press("Enter")
        expect(first.get_by_text("Kept. The conversation goes on with")).to_be_visible()
        check_look(first, "chat-talk")
        second.get_by_role("link", name="Look after").press("Enter")
        table = second.get_by_role("region", name="Satisfaction")
        expect(table).to_contain_text("cannot tell below 30 conversations")
        expect(second.locator("#state")).to_contain_text("No answer came from the fallback.")
        check_look(second, "chat-look")
        first.get_by_role("link", name="Your data").press("Enter")
        expect(first.locator("#kept")).to_contain_text("3 ratings of yours are kept")
        check_look(first, "chat-mine")
        first.get_by_role("button", name="Delete them").press("Enter")
        expect(first.locator("#kept")).to_contain_text("0 ratings of yours are kept")
        with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
            (kept,) = registry.ratings("default")
        assert (kept.rating.key, kept.rating.score) == ("thumb", -1.0)
        first.get_by_role("link", name="Talk").press("Enter")
        first.get_by_role("button", name="New conversation").press("Enter")
        expect(first.get_by_role("log")).to_be_empty()
        expect(first.locator("#notice")).to_be_empty()
    assert complaints == []
