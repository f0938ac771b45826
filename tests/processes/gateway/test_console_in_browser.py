"""The console in a real browser, headless: a person signs in, trains, decides, and is alone with it.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/gateway.md there.
"""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest

from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.gateway.gateway_stand import PASSWORD, end_jobs, operator
from tests.support.gateway.job_templates import write_templates, write_tiny
from tests.support.run.harness import PATIENCE_S, GatewayProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [needs_chromium, pytest.mark.timeout(600)]
HIDDEN: Final = (
    "/api/projects/alpha",
    "/api/projects/alpha/members",
    "/api/projects/alpha/audit",
    "/api/projects/alpha/jobs",
    "/api/projects/alpha/events?job=",
    "/api/projects/alpha/agents/my_agent/feedback",
    "/api/projects/alpha/agents/my_agent/satisfaction",
)
"""Paths of a new project and its agent."""
HIDDEN_OF_A_JOB: Final = ("", "/log", "/curve", "/versions")
PAGES: Final = {"feedback": "Feedback", "people": "People", "audit": "Audit", "jobs": "Jobs"}
"""Pages of the console by their address, and the heading of each."""
POINTS = "() => (document.querySelector('.curve polyline')?.getAttribute('points') ?? '').split(' ').length"


@pytest.fixture
def browser() -> Iterator["Browser"]:
    with chromium() as started:
        yield started


def add_owner(folder: Path, name: str, project: str) -> None:
    done = operator(folder, "user", "add", name, "--project", project, stdin=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GatewayProcess]:
    """A gateway that runs jobs, with an owner of `alpha` and one of `beta`; by parameter from feedback."""
    if getattr(request, "param", "") == "feedback":
        pytest.importorskip("peft", reason="language models need the extra rlhf")
        write_tiny(tmp_path / "templates")
    else:
        write_templates(tmp_path / "templates")
        (tmp_path / "templates" / "wrong.toml").unlink()
    add_owner(tmp_path, "ada", "alpha")
    add_owner(tmp_path, "bob", "beta")
    with GatewayProcess(tmp_path, "--templates", "templates", "--models", "models") as started:
        yield started
    end_jobs(tmp_path)


def signed_in(browser: "Browser", gateway: GatewayProcess, name: str, complaints: list[str]) -> "Page":
    tab = open_tab(browser, gateway.url, complaints)
    tab.get_by_label("Name", exact=True).fill(name)
    tab.get_by_label("Name", exact=True).press("Tab")
    tab.keyboard.type(PASSWORD)
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Jobs").wait_for()
    return tab


def test_buttons_steer_a_run_and_other_pages_follow_without_reloading(
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


def test_a_wrong_password_is_said(browser: "Browser", gateway: GatewayProcess) -> None:
    tab = open_tab(browser, gateway.url, [])
    tab.get_by_label("Name", exact=True).fill("ada")
    tab.get_by_label("Password", exact=True).fill("wrong")
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_text("name or password is wrong").wait_for()


@pytest.mark.parametrize(
    "gateway",
    ["", pytest.param("feedback", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    indirect=True,
    ids=["CartPole", "feedback"],
)
def test_from_an_invitation_to_a_version_that_is_rolled_back(
    browser: "Browser", gateway: GatewayProcess, tmp_path: Path
) -> None:
    complaints: list[str] = []
    is_feedback = (tmp_path / "templates" / "rlhf.toml").exists()
    owner = signed_in(browser, gateway, "ada", complaints)
    tab = open_tab(browser, gateway.url, complaints)
    check_look(tab, "console-sign-in")
    sign_up(tab, invitation(owner))
    rate(tab)
    compare(tab)
    job = estimate_and_start(tab, is_feedback=is_feedback)
    if is_feedback:
        is_listed(tab, tmp_path)
    decide(tab)
    owner.get_by_role("link", name="Audit").click()
    audit = owner.get_by_role("region", name="Who did what, newest first")
    for action in (
        *("project added", "member set", "job queued", "job finished"),
        *("promote", "weights read", "roll back"),
    ):
        expect(audit).to_contain_text(action)
    check_look(owner, "console-audit")
    refused: list[str] = []
    finds_nothing(signed_in(browser, gateway, "bob", refused), gateway, job)
    owner.reload()
    audit.wait_for()
    owner.get_by_role("button", name="Sign out").click()
    owner.get_by_role("heading", name="Sign in").wait_for()
    assert complaints == []
    assert [one for one in refused if "404" not in one] == []


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


def test_a_rating_without_room_is_not_reported_as_repeated(browser: "Browser", tmp_path: Path) -> None:
    add_owner(tmp_path, "ada", "alpha")
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
    owner.get_by_role("link", name="People").click()
    owner.get_by_role("combobox", name="Role", exact=True).select_option("editor")
    owner.get_by_role("button", name="Invite").click()
    secret = owner.get_by_text("Shown this once: ")
    secret.wait_for()
    check_look(owner, "console-people")
    return (secret.text_content() or "").removeprefix("Shown this once: ")


def sign_up(tab: "Page", secret: str) -> None:
    tab.get_by_label("Invitation").fill(secret)
    tab.get_by_label("New name").fill("cyd")
    tab.get_by_label("New password").fill(PASSWORD)
    tab.get_by_role("button", name="Sign up").click()
    tab.get_by_text("cyd, editor of alpha").wait_for()


def rate(tab: "Page") -> None:
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


def estimate_and_start(tab: "Page", *, is_feedback: bool) -> str:
    """By the keyboard: what a training would take, and then it, with its curve; returns the job's id."""
    tab.get_by_role("link", name="Jobs").press("Enter")
    tab.get_by_role("heading", name="Start a training").wait_for()
    tab.get_by_label("Agent", exact=True).fill("my_agent")
    if not is_feedback:
        tab.get_by_label("maxSteps").fill("200")
    tab.get_by_role("button", name="Estimate").press("Enter")
    told = tab.get_by_label("Estimate")
    expect(told).to_contain_text(re.compile(r"About [\d.]+ minutes, with"), timeout=1000 * PATIENCE_S)
    if is_feedback:
        expect(told).to_contain_text("It learns from 12 ratings, 0.50 ± 0.34.")
    check_look(tab, "console-estimate" if is_feedback else "console-jobs")
    tab.get_by_role("button", name="Start").press("Enter")
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    job = tab.url.rpartition("/")[2]
    tab.wait_for_function(f"() => ({POINTS})() > 2")
    seen = tab.evaluate(POINTS)
    expect(tab.get_by_label("Log")).to_contain_text("training", timeout=1000 * PATIENCE_S)
    expect(tab.locator("#state")).to_have_text("finished", timeout=1000 * PATIENCE_S)
    tab.wait_for_function(f"() => ({POINTS})() > {seen}")
    assert "updates" in (tab.get_by_role("img").get_attribute("aria-label") or "")
    return job


def decide(tab: "Page") -> None:
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


def is_listed(tab: "Page", folder: Path) -> None:
    result = tab.get_by_role("region", name="Result")
    expect(result).to_contain_text("v12")
    expect(tab.get_by_role("region", name="Versions", exact=True)).to_contain_text("v12 (")
    place = result.get_by_role("row").filter(has_text=re.compile("^modelPath")).get_by_role("cell").last
    assert (folder / (place.text_content() or "") / "adapter_model.safetensors").is_file()


def finds_nothing(tab: "Page", gateway: GatewayProcess, job: str) -> None:
    for page, heading in PAGES.items():
        tab.goto(f"{gateway.url}/#/alpha/{page}")
        tab.get_by_role("heading", name=heading, exact=True).wait_for()
        tab.get_by_text("owner of beta").wait_for()
        for word in ("my_agent", "cyd", job):
            assert tab.get_by_text(word).count() == 0, (page, word)
    tab.goto(f"{gateway.url}/#/alpha/jobs/{job}")
    tab.get_by_text("no such job").wait_for()
    assert tab.get_by_role("heading", name="Training of my_agent").count() == 0
    token: Any = tab.evaluate("JSON.parse(sessionStorage.getItem('penstock')).access_token")
    headers = {"Authorization": f"Bearer {token}"}
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=60) as http:
        addresses = (*HIDDEN, *(f"/api/projects/alpha/jobs/{job}{one}" for one in HIDDEN_OF_A_JOB))
        assert {one: http.get(one).status_code for one in addresses} == dict.fromkeys(addresses, 404)
        named = {"Penstock-Project": "alpha"}
        assert http.get("/api/policies/my_agent", headers=named).status_code == 404
        assert http.get("/api/policies/my_agent").json() == []


def test_a_person_signs_in_at_the_provider_and_another_is_told_what_is_lacking(
    browser: "Browser", tmp_path: Path
) -> None:
    pytest.importorskip("oidc_provider_mock", reason="a provider for tests, of the extra test-people")
    from tests.support.gateway.identity_provider import identity_provider

    add_owner(tmp_path, "owner", "alpha")
    with socket.create_server(("127.0.0.1", 0)) as server:  # its address stands in a file before it starts
        listen = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "secret").write_text("of the client")
    (tmp_path / "secret").chmod(0o600)
    with identity_provider() as provider:
        (tmp_path / "oidc.toml").write_text(
            f'issuer = "{provider.issuer}"\nclient_id = "penstock"\nclient_secret_file = "secret"\n'
            f'gateway = "http://{listen}"\ntitle = "Example"\n'
            '[domains."example.com"]\nproject = "alpha"\nrole = "editor"\n'
        )
        with GatewayProcess(tmp_path, "--oidc", "oidc.toml", "--listen", listen) as gateway:
            tab = browser.new_context().new_page()
            tab.set_default_timeout(1000 * PATIENCE_S)
            tab.goto(gateway.url)
            tab.get_by_role("button", name="Go to Example").click()
            tab.wait_for_url(f"{provider.issuer}/**")
            tab.locator("[name=sub][value=bob], button:has-text('bob')").first.click()
            tab.get_by_role("alert").get_by_text("You have no account here").wait_for()
            tab.get_by_role("button", name="Go to Example").click()
            tab.wait_for_url(f"{provider.issuer}/**")
            tab.locator("[name=sub][value=alice], button:has-text('alice')").first.click()
            tab.get_by_text("alice, editor of alpha").wait_for()
            assert "code" not in tab.url
            assert tab.evaluate("document.cookie") == ""
            tab.reload()
            tab.get_by_text("alice, editor of alpha").wait_for()
