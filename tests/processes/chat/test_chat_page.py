"""The page of the chat in a real browser, headless: talked to by the keyboard, rated, looked after.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/chat.md there.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.registry.records import NewVersion, Origin, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import read_kept, write_kept
from penstock.workloads.chat import loop_state
from penstock.workloads.chat.loop_state import LoopOrder, read_head_weights
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.chat.chat_gateway import ChatGateway
from tests.support.run.harness import eventually

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


def test_two_people_talk_and_rate_and_an_operator_watches(browser: "Browser", tmp_path: Path) -> None:
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
        first.get_by_label("What it should have said").fill("I am well, thank you.")
        first.get_by_role("button", name="Keep it").press("Enter")
        expect(first.get_by_text("Kept: what it should have said.")).to_be_visible()
        say(first, "tell me a joke", 2)
        first.get_by_role("button", name="Answer once more").press("Enter")
        first.get_by_role("button", name="The second is better").press("Enter")
        expect(first.get_by_text("Kept. The conversation goes on with")).to_be_visible()
        check_look(first, "chat-talk")
        second.get_by_role("link", name="Look after").press("Enter")
        table = second.get_by_role("region", name="Satisfaction: thumbs-up among all conversations")
        expect(table).to_contain_text("cannot tell below 30 conversations")
        counted = second.get_by_role("region", name="Satisfaction by day (UTC) and by person")
        expect(counted).to_contain_text("cannot tell below 30")
        people = counted.get_by_role("row").filter(has_text="person")
        expect(people).to_have_count(3)  # the heading, and both
        expect(second.locator("#state")).to_contain_text("No answer came from the fallback.")
        check_look(second, "chat-look")
        first.get_by_role("link", name="Your data").press("Enter")
        expect(first.locator("#kept")).to_contain_text("4 ratings of yours are kept")
        check_look(first, "chat-mine")
        first.get_by_role("button", name="Delete them").press("Enter")
        expect(first.locator("#kept")).to_contain_text("0 ratings of yours are kept")
        second.get_by_role("button", name="Look again").press("Enter")
        expect(people).to_have_count(2)
        with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
            (kept,) = registry.ratings("default")
        assert (kept.rating.key, kept.rating.score) == ("thumb", -1.0)
        first.get_by_role("link", name="Talk").press("Enter")
        first.get_by_role("button", name="New conversation").press("Enter")
        expect(first.get_by_role("log")).to_be_empty()
        expect(first.locator("#notice")).to_be_empty()
    assert complaints == []


def test_an_operator_promotes_rolls_back_and_pauses(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    with ChatGateway(tmp_path, "--train=learner.keep_every_updates=1000") as gateway:
        run = gateway.state / "run"
        with Registry.open(f"sqlite:///{run}/registry.sqlite", migrate=True) as registry:
            eventually(lambda: bool(registry.list("default")), "the first version", 60)
            canary = copied_as_canary(registry, run, tmp_path / "other")
        loop_state.write_state(loop_state.folder_of(run), STANDS)
        talking, tab = (open_tab(browser, gateway.url, complaints, "/chat") for _ in range(2))
        say(talking, "hello", 1)
        tab.get_by_role("link", name="Look after").press("Enter")
        expect(tab.locator("#canaries")).to_contain_text("Canaries so far: 1.")
        expect(tab.locator("#canaries")).to_contain_text("Version 2: ")
        expect(tab.locator("#loop")).to_contain_text("Round 3: the loop trains the next version.")
        expect(tab.get_by_role("region", name="Rounds that are over")).to_contain_text("withdrawn")
        both = tab.get_by_role("region", name="Satisfaction with both since the trial began")
        expect(both.get_by_role("row")).to_have_count(3)  # the heading, the canary, and the active version
        expect(tab.get_by_role("region", name="Decisions")).to_contain_text("put on trial")
        expect(tab.locator("#look")).not_to_contain_text(str(canary))
        check_look(tab, "chat-decide")
        decide(tab, "Promote version 2", "")
        assert tab.evaluate("document.activeElement.id") != "notice"
        with Registry.read(f"sqlite:///{run}/registry.sqlite") as registry:
            assert registry.canary("default") is not None, "a decision without a reason is none"
        decide(tab, "Promote version 2", "people like it")
        expect(tab.get_by_role("region", name="Decisions")).to_contain_text("people like it")
        expect(tab.get_by_role("button", name="Roll back version 2")).to_be_visible()
        measured = tab.get_by_role("region", name="What counts in the reward")
        expect(measured).to_contain_text(re.compile(r"thumb\s*2\s*2\s*41\s*0\.71\s*0\.19\s*0\.06"))
        weigh(tab, "safety counts", "-1", "children read it")
        assert tab.get_by_label("safety counts").evaluate("one => one === document.activeElement")
        weigh(tab, "safety counts", "2.5", "children read it")
        expect(tab.get_by_role("region", name="Decisions")).to_contain_text("weighed safety 2.5")
        expect(measured).to_contain_text(re.compile(r"safety\s*2\.5\s*1\s*12"))
        assert read_head_weights(loop_state.folder_of(run)).standing == {"safety": 2.5}
        decide(tab, "Pause the loop", "holidays")
        expect(tab.locator("#paused")).to_contain_text("Paused by page: holidays")
        check_look(tab, "chat-paused")
        tab.get_by_role("button", name="Let the loop go on").press("Enter")
        expect(tab.locator("#paused")).to_have_count(0)
        gives_a_round_up(tab, loop_state.folder_of(run))
        decide(tab, "Roll back version 2", "no, they do not")
        expect(tab.get_by_role("button", name=re.compile("Roll back version [12]$"))).to_be_visible()
        say(talking, "how are you", 2)
        with Registry.read(f"sqlite:///{run}/registry.sqlite") as registry:
            active = registry.active("default")
            assert active is not None
            # Its content, which may have a number of its own by now.
            assert active.sha256 == registry.get("default", 1).sha256
            decided = [one for one in registry.events("default", 10) if one.by == "page"]
            assert [(one.action.value, one.version) for one in decided] == [
                ("rolled_back", canary),
                ("promoted", canary),
            ]
        expect(tab.locator("#notice")).to_be_empty()
    assert complaints == []


STANDS = loop_state.LoopState(
    number=2,
    step=loop_state.Step.TRIAL,
    labels=40,
    through=40,
    version=7,
    auc=0.71,
    order=LoopOrder(labels=40, weights=("thumb=2",)).shown(),
    judge={
        "round": 2,
        "weights": {"thumb": 2.0, "safety": 1.0, "preferred": 0.0},
        "measures": {
            "heads": {
                "thumb": {"ratings": 41, "squared_error": 0.19, "auc": 0.71, "calibration_error": 0.06},
                "safety": {"ratings": 12, "squared_error": 0.11, "auc": None, "calibration_error": 0.15},
            },
            "pairs": 9,
            "pair_accuracy": 0.67,
        },
    },
).ended(loop_state.Outcome.WITHDRAWN, "worse")
STANDS = replace(STANDS, number=3, step=loop_state.Step.TRAINING)


def gives_a_round_up(tab: "Page", folder: Path) -> None:
    """A step has failed as often as it is tried: somebody sees why, has it tried again, and gives it up."""
    loop_state.write_state(folder, replace(STANDS, failure="the disk is full", tries=3))
    loop_state.pause(folder, "training failed: the disk is full", "loop")
    tab.get_by_role("button", name="Look again").press("Enter")
    expect(tab.locator("#failure")).to_have_text("This step has failed 3 times: the disk is full")
    expect(tab.locator("#paused")).to_have_text(
        "It is not tried again by itself: try again, or abandon the round."
    )
    check_look(tab, "chat-failed")
    tab.get_by_role("button", name="Try again").press("Enter")
    expect(tab.locator("#paused")).to_have_count(0)
    decide(tab, "Abandon round 3", "it fails each time")
    expect(tab.locator("#abandoned")).to_have_text("page has given this round up: it fails each time")
    assert loop_state.read_abandonment(folder) == loop_state.Abandonment(3, "it fails each time", "page")


def decide(tab: "Page", name: str, why: str) -> None:
    """Say why, and press a button, by the keyboard."""
    field = tab.get_by_label("Why, for the audit")
    field.focus()
    field.fill("")
    tab.keyboard.type(why)
    tab.get_by_role("button", name=name, exact=True).press("Enter")


def weigh(tab: "Page", label: str, number: str, why: str) -> None:
    """Say what a criterion counts and why, and press the button, by the keyboard."""
    field = tab.get_by_label(label)
    field.focus()
    field.fill("")
    tab.keyboard.type(number)
    decide(tab, "Weigh so from the next round on", why)


def copied_as_canary(registry: Registry, run: Path, other: Path) -> int:
    """The first version once more, as the canary of another run; its number."""
    first = registry.list("default")[0]
    registry.promote("default", first.version, "the first", by="test")
    version = registry.reserve("default", "other")
    write_kept(other, version, read_kept(run, first.version, first.sha256))
    shutil.copy(run / "policies" / "policy.json", other / "policies" / "policy.json")
    registry.register(
        NewVersion(
            policy="default",
            version=version,
            run="other",
            update=1,
            sha256=first.sha256,
            size_bytes=first.size_bytes,
            origin=Origin.IMPORT,
            place=str(other),
        ),
        by="test",
    )
    registry.promote("default", version, "tried", by="test", to=Status.CANARY, canary_share=0.5)
    return version
