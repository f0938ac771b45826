"""Who talks, and to whom, on the page of the chat in a real browser; what is asked of them, and expected.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/chat.md there.
"""

import random
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import requests

from penstock.gateway.store.tables import Role
from penstock.gateway.upstream import RunAddresses
from penstock.registry.records import NewVersion, Origin, Status
from penstock.registry.registry import Registry
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab, take_picture
from tests.support.chat.chat_stand import (
    PROJECT,
    beside,
    chat_app,
    page_of,
    served_judge,
    upstream_at,
    upstream_of,
)
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway
from tests.support.language.text_stand import make_model, served_text

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


def in_view(tab: "Page", name: str) -> bool:
    """Whether all of a field or a button is in the window."""
    box = tab.get_by_label(name).or_(tab.get_by_role("button", name=name, exact=True)).bounding_box()
    size = tab.viewport_size
    assert box is not None
    assert size is not None
    return box["x"] >= 0 and box["y"] >= 0 and box["x"] + box["width"] <= size["width"] and (
        box["y"] + box["height"] <= size["height"]
    )  # fmt: skip


@pytest.mark.parametrize("size", [(1280, 900), (390, 800)])
def test_the_text_box_stays_in_view_and_the_newest_answer_above_it(
    browser: "Browser", tmp_path: Path, short_folder: Path, size: tuple[int, int]
) -> None:
    complaints: list[str] = []
    with (
        upstream_of(make_model(tmp_path / "base"), tmp_path, short_folder / "text.sock") as run,
        page_of(chat_app(run, {}, None)) as url,
    ):
        tab = open_tab(browser, url, complaints, "/chat")
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        stop = tab.get_by_role("button", name="Stop")
        assert stop.evaluate("one => getComputedStyle(one).opacity") == "0.5", "it looks disabled"
        for number in range(10):
            say(tab, "sum 3 sea", number + 1)
            assert in_view(tab, "Say something")
            assert in_view(tab, "Send")
        newest = tab.get_by_role("button", name="I like this answer").last.bounding_box()
        dock = tab.locator("#dock").bounding_box()
        assert newest is not None
        assert dock is not None
        assert 0 <= newest["y"] <= dock["y"] - newest["height"]
        take_picture(tab, f"chat-long-{size[0]}", whole=False)
        check_look(tab, "chat-long")
    assert complaints == []


def test_what_was_typed_is_there_when_an_answer_fails(
    browser: "Browser", tmp_path: Path, short_folder: Path
) -> None:
    base, socket = make_model(tmp_path / "base"), short_folder / "text.sock"
    known = RunAddresses()
    with ExitStack() as stack:
        run = stack.enter_context(upstream_at(tmp_path, socket))
        run = replace(run, addresses=lambda: known)
        url = stack.enter_context(page_of(chat_app(run, {}, None)))
        tab = open_tab(browser, url, [], "/chat")
        box, notice = tab.get_by_label("Say something"), tab.locator("#notice")
        expect(tab.locator("#waits")).to_contain_text("its model is still being made")
        check_look(tab, "chat-waits")
        send(tab, "sum 3 sea")
        expect(notice).not_to_be_empty()
        expect(box).to_have_value("sum 3 sea")
        with served_text(base, socket, learns=False):
            known = RunAddresses(server=f"unix:{socket}")
            expect(tab.locator("#waits")).to_be_empty()
            box.press("Enter")
            expect(tab.get_by_role("button", name="I like this answer")).to_have_count(1)
            expect(box).to_have_value("")
            expect(notice).to_be_empty()
        send(tab, "done 3")  # its server is away
        expect(box).to_have_value("done 3")
        expect(tab.get_by_role("log")).to_contain_text("not answered")
        stack.close()  # and so is the gateway
        send(tab, "sea")
        expect(notice).not_to_be_empty()
        expect(box).to_have_value("sea")


def test_who_looks_after_reads_numbers_of_people_and_one_time_of_a_trial(
    browser: "Browser", tmp_path: Path, short_folder: Path
) -> None:
    complaints: list[str] = []
    with (
        upstream_of(make_model(tmp_path / "base"), tmp_path, short_folder / "text.sock") as run,
        page_of(chat_app(run, {}, None)) as url,
        Registry.open(f"sqlite:///{tmp_path / 'registry.sqlite'}", migrate=True) as registry,
    ):
        for digit, number in enumerate((67_108_910, 134_217_729), 1):
            about: dict[str, Any] = {"run": "run", "update": 1, "size_bytes": 1, "origin": Origin.FINAL}
            made = NewVersion(policy="default", version=number, sha256=f"{digit}" * 64, **about)
            registry.register(made, by="test")
        registry.promote("default", 67_108_910, "the first", by="test")
        registry.promote("default", number, "tried", by="test", to=Status.CANARY, canary_share=0.5)
        tab = open_tab(browser, url, complaints, "/chat#look")
        both = tab.get_by_role("region", name="Satisfaction with both since the trial began")
        expect(both.get_by_role("row")).to_have_count(3)  # the heading, the canary, and the active version
        decisions = tab.get_by_role("region", name="Decisions")
        expect(decisions).to_contain_text(re.compile(r"put on trial\s*2\s*test\s*tried"))
        expect(decisions).to_contain_text(re.compile(r"promoted\s*1\s*test\s*the first"))
        for name in ("Promote version 2", "Withdraw version 2", "Roll back version 1"):
            expect(tab.get_by_role("button", name=name, exact=True)).to_be_visible()
        expect(tab.locator("#look")).not_to_contain_text("67108910")
        expect(tab.locator("#look")).not_to_contain_text(str(number))
        check_look(tab, "chat-trial")
    assert complaints == []


def send(tab: "Page", text: str) -> None:
    """Type over what is in the box, and send it."""
    tab.get_by_label("Say something").fill(text)
    tab.keyboard.press("Enter")


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
            expect(tab.get_by_text("Expected of people: ")).to_have_count(0)  # who rates is not to know
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
