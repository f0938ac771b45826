"""Who talks, and to whom, on the page of the chat in a real browser; what is asked of them, and expected.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/chat.md there.
"""

import random
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import requests

from penstock.gateway.store.tables import Role
from penstock.registry.registry import Registry
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.chat.chat_stand import PROJECT, beside, chat_app, page_of, served_judge, upstream_of
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway
from tests.support.language.text_stand import make_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.timeout(600)]


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


def test_somebody_is_invited_signs_in_and_chooses_whom_to_talk_to(
    browser: "Browser", tmp_path: Path, short_folder: Path
) -> None:
    complaints: list[str] = []
    base = make_model(tmp_path / "base")
    gateway = SmallGateway.at(
        f"sqlite:///{tmp_path / 'accounts.sqlite'}", f"sqlite:///{tmp_path / 'other.sqlite'}", tmp_path
    )
    gateway.person("owner", PROJECT, Role.OWNER)
    invited = gateway.client.post(
        f"/api/projects/{PROJECT}/invitations", json={"role": "viewer"}, headers=gateway.bearer("owner")
    )
    with ExitStack() as stack:
        runs = []
        for name in ("first", "coder"):
            (tmp_path / name).mkdir()
            run = upstream_of(base, tmp_path / name, short_folder / name, policy=name)
            runs.append(stack.enter_context(run))
        url = stack.enter_context(page_of(chat_app(runs[0], {"coder": runs[1]}, gateway)))
        tab = open_tab(browser, url, complaints, f"/chat#invitation={invited.json()['invitation']}")
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
        complaints.clear()  # the browser itself tells that the first call was refused
        check_look(tab, "chat-sign-in")
        sign_up = tab.locator("form", has=tab.get_by_label("Invitation"))
        sign_up.get_by_label("Name").fill("ann")
        sign_up.get_by_label("New password").fill(PASSWORD)
        sign_up.get_by_label("New password").press("Enter")
        expect(tab.locator("#who")).to_contain_text(f"ann, viewer of {PROJECT}")
        say(tab, "sum", 1)
        tab.get_by_role("button", name="I like this answer").press("Enter")
        expect(tab.get_by_text("Kept.")).to_be_visible()
        tab.get_by_label("Talk to").select_option("coder")
        expect(tab.get_by_role("log")).to_be_empty()
        say(tab, "sum", 1)
        tab.get_by_role("button", name="I do not like this answer").press("Enter")
        expect(tab.get_by_text("Kept.")).to_be_visible()
        check_look(tab, "chat-agents")
        tab.get_by_role("link", name="Your data").press("Enter")
        expect(tab.locator("#kept")).to_contain_text("2 ratings of yours are kept")
        expect(tab.locator("#notice")).to_be_empty()
        assert complaints == []
        tab.get_by_role("button", name="Sign out").press("Enter")
        expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    for name, score in (("first", 1.0), ("coder", -1.0)):
        with Registry.read(f"sqlite:///{tmp_path / name / 'registry.sqlite'}") as registry:
            assert [kept.rating.score for kept in registry.ratings(name)] == [score]


def test_operators_see_expected_ratings_and_people_are_asked_to_rate(
    browser: "Browser", tmp_path: Path, short_folder: Path
) -> None:
    complaints: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "judge").mkdir()
    with ExitStack() as stack:
        beside(tmp_path / "run", stack.enter_context(served_judge(tmp_path / "judge")))
        run = upstream_of(make_model(tmp_path / "base"), tmp_path / "run", short_folder / "text.sock")
        url = stack.enter_context(page_of(chat_app(stack.enter_context(run), {}, None)))
        # Of what the page says, as of what was said before, a fifth is asked about: 28 are enough.
        texts = list(product(("sum", "3", "sea", "done"), repeat=3))
        random.Random(0).shuffle(texts)
        for words in texts[:24]:
            said = {"me": secrets.token_hex(8)}
            begun = requests.post(f"{url}/api/chat/begin", json=said, timeout=60).json()
            said |= {"conversation": begun["conversation"], "text": " ".join(words)}
            assert requests.post(f"{url}/api/chat/say", json=said, timeout=60).status_code == 200
        tab = open_tab(browser, url, complaints, "/chat")
        asks = tab.get_by_text("Please say whether you like this answer")
        for count, words in enumerate(texts[24:52], 1):
            say(tab, " ".join(words), count if count < 2 else 1)
            expect(tab.get_by_text("Expected of people: ")).to_be_visible()
            if asks.count():
                break
            tab.get_by_role("button", name="New conversation").press("Enter")
            expect(tab.get_by_role("log")).to_be_empty()
        expect(asks).to_be_visible()
        tab.get_by_text("Say more").press("Enter")
        tab.get_by_label("What it should have said").fill("It is four.")
        check_look(tab, "chat-asked")
        tab.get_by_role("button", name="Keep it").press("Enter")
        expect(tab.get_by_text("Kept: what it should have said.")).to_be_visible()
        tab.get_by_role("link", name="Look after").press("Enter")
        expect(tab.get_by_role("region", name="Satisfaction: thumbs-up")).to_contain_text("asked about")
        expect(tab.locator("#notice")).to_be_empty()
    assert complaints == []
    with Registry.read(f"sqlite:///{tmp_path / 'run' / 'registry.sqlite'}") as registry:
        (kept,) = registry.ratings("default")
    assert (kept.rating.key, kept.rating.response) == ("corrected", "It is four.")
