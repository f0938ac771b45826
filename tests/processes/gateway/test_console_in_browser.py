"""The console in a real browser, headless: a person signs in, trains, decides, and is alone with it.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/gateway.md there.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2

from tests.processes.gateway.test_gateway_process import PASSWORD, operator
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.gateway.gateway_process import PATIENCE_S, GatewayProcess, end_jobs
from tests.support.gateway.job_templates import write_templates

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [needs_chromium, pytest.mark.timeout(600)]
POINTS = "() => (document.querySelector('.curve polyline')?.getAttribute('points') ?? '').split(' ').length"


@pytest.fixture
def browser() -> Iterator["Browser"]:
    """A browser."""
    with chromium() as started:
        yield started


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that runs jobs, with an owner of `alpha` and one of `beta`."""
    write_templates(tmp_path / "templates")
    (tmp_path / "templates" / "wrong.toml").unlink()
    for name, project in (("ada", "alpha"), ("bob", "beta")):
        done = operator(tmp_path, "user", "add", name, "--project", project, stdin=f"{PASSWORD}\n")
        assert done.returncode == 0, done.stderr
    with GatewayProcess(tmp_path, "--templates", "templates") as started:
        yield started
    end_jobs(tmp_path)


def signed_in(browser: "Browser", gateway: GatewayProcess, name: str, complaints: list[str]) -> "Page":
    """A tab of a profile of its own, in which somebody has signed in by the keyboard."""
    tab = open_tab(browser, gateway.url, complaints)
    tab.get_by_label("Name", exact=True).fill(name)
    tab.get_by_label("Name", exact=True).press("Tab")
    tab.keyboard.type(PASSWORD)
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Jobs").wait_for()
    return tab


def test_a_person_trains_and_decides_and_another_sees_nothing_of_it(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    complaints: list[str] = []
    tab = signed_in(browser, gateway, "ada", complaints)
    tab.get_by_label("Agent").fill("my_agent")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    expect(tab.get_by_label("Log")).to_contain_text("training", timeout=1000 * PATIENCE_S)
    expect(tab.locator("#state")).to_have_text("finished", timeout=1000 * PATIENCE_S)
    tab.get_by_role("button", name=re.compile("^promote ")).first.click()
    expect(tab.get_by_role("region", name="Versions")).to_contain_text("active")
    tab.get_by_role("link", name="Audit").click()
    audit = tab.get_by_role("region", name="Who did what, newest first")
    for action in ("job queued", "job finished", "promote", "project added"):
        expect(audit).to_contain_text(action)
    tab.get_by_role("link", name="People").click()
    tab.get_by_role("region", name="Members").get_by_text("ada", exact=True).wait_for()
    tab.reload()
    tab.get_by_role("heading", name="People", exact=True).wait_for()
    other = signed_in(browser, gateway, "bob", complaints)
    other.goto(f"{gateway.url}/#/alpha/jobs")
    other.get_by_text("owner of beta").wait_for()
    assert other.get_by_text("my_agent").count() == 0
    tab.get_by_role("button", name="Sign out").click()
    tab.get_by_role("heading", name="Sign in").wait_for()
    assert complaints == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_is_steered_by_buttons_and_others_see_it_without_asking_again(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    complaints: list[str] = []
    tab, other = (signed_in(browser, gateway, "ada", complaints) for _ in range(2))
    tab.get_by_label("Agent").fill("my_agent")
    tab.get_by_label("maxSteps").fill("50000")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    row = other.get_by_role("row").filter(has_text="my_agent")
    expect(row).to_contain_text("running", timeout=1000 * PATIENCE_S)
    tab.wait_for_function(f"() => ({POINTS})() > 2")
    asked: list[str] = []
    for one in (tab, other):
        one.on("request", lambda request: asked.append(f"{request.method} {request.url}"))
    steer(tab)
    check_look(tab, "console-steering")
    tab.get_by_role("button", name="stop", exact=True).click()
    expect(tab.locator("#state")).not_to_have_text("running", timeout=1000 * PATIENCE_S)
    expect(row).not_to_contain_text("running", timeout=1000 * PATIENCE_S)
    assert [one for one in asked if one.startswith("GET")] == []  # what changes is sent
    tab.get_by_role("link", name="Audit").click()
    audit = tab.get_by_role("region", name="Who did what, newest first")
    for action in ("pause", "resume", "checkpoint", "restore", "flush", "stop"):
        expect(audit).to_contain_text(f"run: {action}")
    expect(audit).to_contain_text("traffic")
    assert [one for one in complaints if "409" not in one] == []


def steer(tab: "Page") -> None:
    """What is asked of a run, and what it answers."""
    told = tab.get_by_label("What the run answered")
    for action in ("pause", "resume"):
        tab.get_by_role("button", name=action, exact=True).click()
        expect(told).to_contain_text(f"{action}: wanted is", timeout=1000 * PATIENCE_S)
    tab.get_by_text("Named checkpoints, flush").click()
    for label, button in (("Name of the checkpoint", "Keep a checkpoint"), ("Go back to", "Go back to it")):
        tab.get_by_label(label, exact=True).fill("before")
        tab.get_by_role("button", name=button).click()
        expect(told).to_contain_text(": done", timeout=1000 * PATIENCE_S)
    tab.get_by_role("button", name="Flush").click()
    expect(told).to_contain_text("flush: ", timeout=1000 * PATIENCE_S)
    tab.get_by_text("Traffic", exact=True).click()
    tab.get_by_label("Share of the newest").fill("0.5")
    tab.get_by_role("button", name="Change the traffic").click()


def test_a_wrong_password_is_said_and_the_page_may_not_be_framed(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    tab = browser.new_page()
    reply = tab.goto(gateway.url)
    assert reply is not None
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    tab.get_by_label("Name", exact=True).fill("ada")
    tab.get_by_label("Password", exact=True).fill("wrong")
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_text("name or password is wrong").wait_for()


def test_from_an_invitation_to_a_version_that_is_rolled_back(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    complaints: list[str] = []
    owner = signed_in(browser, gateway, "ada", complaints)
    tab = open_tab(browser, gateway.url, complaints)
    check_look(tab, "console-sign-in")
    sign_up(tab, invitation(owner))
    rate(tab)
    compare(tab)
    estimate_and_start(tab)
    decide(tab)
    owner.get_by_role("link", name="Audit").click()
    audit = owner.get_by_role("region", name="Who did what, newest first")
    for action in ("promote", "roll back", "job finished"):
        expect(audit).to_contain_text(action)
    check_look(owner, "console-audit")
    other = signed_in(browser, gateway, "bob", complaints)
    other.goto(f"{gateway.url}/#/alpha/feedback")
    other.get_by_text("owner of beta").wait_for()
    assert other.get_by_text("my_agent").count() == 0
    assert complaints == []


def test_somebody_without_an_account_rates_by_a_link(
    browser: "Browser", gateway: GatewayProcess, tmp_path: Path
) -> None:
    token = operator(tmp_path, "token", "add", "ci", "--project", "alpha").stdout.strip()
    pair = {"prompt": "2 + 2?", "responses": ["four", "five"]}
    single = {"prompt": "say it", "response": "<b>hello</b>\nyou"}
    with httpx2.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {token}"}) as http:
        asked = {"items": [single, pair], "rater": "user-7"}
        made = http.post("/api/projects/alpha/agents/my_agent/links", json=asked).json()
        complaints: list[str] = []
        tab = open_tab(browser, gateway.url, complaints, made["page"])
        tab.get_by_text("<b>hello</b>\nyou").wait_for()
        check_look(tab, "link")
        tab.get_by_label("Score of 1, 0 to 1").fill("0.5")
        tab.get_by_role("button", name="Rate").click()
        expect(tab.get_by_label("What became of 1")).to_have_text("Thank you.")
        tab.get_by_role("button", name="The second is better (2)").press("Enter")
        expect(tab.get_by_label("What became of 2")).to_have_text("Thank you.")
        lines = http.get("/api/projects/alpha/agents/my_agent/feedback").text.splitlines()
        first, second = map(json.loads, lines)
        assert (first["score"], second["chosen"], second["rejected"]) == (0.5, "five", "four")
        assert complaints == []
        tab.reload()
        tab.get_by_role("button", name="The first is better (2)").click()
        expect(tab.get_by_label("What became of 2")).to_contain_text("what you said first counts")
        tab.goto(f"{gateway.url}/link#psl_none")
        tab.get_by_text("this link is not valid").wait_for()


def test_a_rating_for_which_there_is_no_room_is_not_taken_for_a_repeated_one(
    browser: "Browser", tmp_path: Path
) -> None:
    done = operator(tmp_path, "user", "add", "ada", "--project", "alpha", stdin=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr
    token = operator(tmp_path, "token", "add", "ci", "--project", "alpha").stdout.strip()
    with GatewayProcess(tmp_path, "--quota", "ratings=0") as gateway:
        asked = {"items": [{"prompt": "2 + 2?", "response": "4"}]}
        made = httpx2.post(
            f"{gateway.url}/api/projects/alpha/agents/my_agent/links",
            json=asked,
            headers={"Authorization": f"Bearer {token}"},
        ).json()
        tab = open_tab(browser, gateway.url, [], made["page"])
        tab.get_by_label("Score of 1, 0 to 1").fill("0.5")
        tab.get_by_role("button", name="Rate").click()
        tab.get_by_text("quota ratings: 0").wait_for()
        expect(tab.get_by_label("What became of 1")).to_have_text("")
        expect(tab.get_by_role("button", name="Rate")).to_be_visible()


def invitation(owner: "Page") -> str:
    """An owner invites an editor."""
    owner.get_by_role("link", name="People").click()
    owner.get_by_role("combobox", name="Role", exact=True).select_option("editor")
    owner.get_by_role("button", name="Invite").click()
    secret = owner.get_by_text("Shown this once: ")
    secret.wait_for()
    check_look(owner, "console-people")
    return (secret.text_content() or "").removeprefix("Shown this once: ")


def sign_up(tab: "Page", secret: str) -> None:
    """A newcomer becomes a member."""
    tab.get_by_label("Invitation").fill(secret)
    tab.get_by_label("New name").fill("cyd")
    tab.get_by_label("New password").fill(PASSWORD)
    tab.get_by_role("button", name="Sign up").click()
    tab.get_by_text("cyd, editor of alpha").wait_for()


def rate(tab: "Page") -> None:
    """They rate twelve answers."""
    tab.get_by_role("link", name="Feedback").click()
    tab.get_by_role("heading", name="Rate an answer").wait_for()
    tab.get_by_label("Of agent").fill("my_agent")
    for number in range(12):
        tab.get_by_label("Prompt").fill(f"question {number}")
        tab.get_by_label("Response").fill("yes of course")
        tab.get_by_label("Score, 0 to 1").fill(str(number % 6 / 5))
        tab.get_by_role("button", name="Rate").click()
        expect(tab.get_by_label("Rated")).to_have_text(f"{number + 1} stored")
    tab.get_by_label("Agent", exact=True).fill("my_agent")
    tab.get_by_role("button", name="Show").click()
    tab.get_by_text("12 ratings, 0.50 on average").wait_for()
    tab.get_by_text("Only some").click()
    tab.get_by_label("Score at least").fill("0.9")
    tab.get_by_label("With the words").fill("QUESTION 5")
    tab.get_by_role("button", name="Show").click()
    tab.get_by_text("1 of 12 ratings: too few to tell").wait_for()
    check_look(tab, "console-feedback")


def compare(tab: "Page") -> None:
    """They say which of two answers is better; late rewards of that agent are shown beside."""
    tab.get_by_label("Who answered").fill("other_agent")
    tab.get_by_label("What was asked").fill("2 + 2?")
    tab.get_by_label("The better answer").fill("four")
    tab.get_by_label("The other answer").fill("five")
    tab.get_by_role("button", name="Prefer").click()
    expect(tab.get_by_label("Compared")).to_have_text("1 stored")
    late = {"rewards": [{"episode": "monday", "step": 3, "amount": 0.5}]}
    path = "/api/projects/alpha/agents/other_agent/late-rewards"
    send = "([path, body]) => import('/console/api.js').then((api) => api.call('POST', path, body))"
    assert tab.evaluate(send, [path, late]) == {"stored": 1}
    tab.get_by_label("Score at least").fill("")
    tab.get_by_label("With the words").fill("")
    tab.get_by_label("Agent", exact=True).fill("other_agent")
    tab.get_by_role("button", name="Show").click()
    tab.get_by_text("1 comparison of two answers").wait_for()
    tab.get_by_role("cell", name="better than: five").wait_for()
    tab.get_by_text("1 late reward, 0.5000 together: no training uses them").wait_for()
    tab.get_by_role("cell", name="monday").wait_for()


def estimate_and_start(tab: "Page") -> None:
    """They ask what a training would take, start it, and see its curve grow."""
    tab.get_by_role("link", name="Jobs").click()
    tab.get_by_role("heading", name="Start a training").wait_for()
    tab.get_by_label("Agent", exact=True).fill("my_agent")
    tab.get_by_label("maxSteps").fill("200")
    tab.get_by_role("button", name="Estimate").click()
    expect(tab.get_by_label("Estimate")).to_contain_text("minutes", timeout=1000 * PATIENCE_S)
    check_look(tab, "console-jobs")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    tab.wait_for_function(f"() => ({POINTS})() > 2")
    seen = tab.evaluate(POINTS)
    expect(tab.locator("#state")).to_have_text("finished", timeout=1000 * PATIENCE_S)
    tab.wait_for_function(f"() => ({POINTS})() > {seen}")
    assert "updates" in (tab.get_by_role("img").get_attribute("aria-label") or "")


def decide(tab: "Page") -> None:
    """They promote a version, another one, and take that back."""
    names = [
        one.text_content() or "" for one in tab.get_by_role("button", name=re.compile("^promote ")).all()
    ]
    newest, earlier = (int(name.removeprefix("promote ")) for name in names[:2])

    def row(number: int) -> "Locator":
        button = tab.get_by_role("button", name=f"promote {number}", exact=True)
        return tab.get_by_role("row").filter(has=button)

    for number in (earlier, newest):
        row(number).get_by_role("button", name="promote").click()
        expect(row(number)).to_contain_text("active")
    check_look(tab, "console-job")
    with tab.expect_download() as downloaded:
        row(newest).get_by_role("button", name="download").click()
    assert downloaded.value.suggested_filename.endswith(f"-{newest}.safetensors")
    row(newest).get_by_role("button", name="roll back").click()
    expect(row(newest)).to_contain_text("rolled")
