"""The console in a real browser, headless: a person signs in, trains, decides, and is alone with it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from tests.processes.gateway.test_gateway_process import PASSWORD, operator
from tests.support.gateway.gateway_process import PATIENCE_S, GatewayProcess
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.leftover_jobs import end_jobs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: install the Debian package chromium"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def browser() -> Iterator["Browser"]:
    """A browser."""
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


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
    tab = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark").new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on(
        "request",
        lambda asked: None if asked.url.startswith(gateway.url) else complaints.append(asked.url),
    )
    tab.goto(gateway.url)
    tab.get_by_label("Name").fill(name)
    tab.get_by_label("Name").press("Tab")
    tab.keyboard.type(PASSWORD)
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Jobs").wait_for()
    return tab


def test_a_person_trains_and_decides_and_another_sees_nothing_of_it(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    """On a phone's width, in the dark; nothing is asked for elsewhere and the page complains of nothing."""
    complaints: list[str] = []
    tab = signed_in(browser, gateway, "ada", complaints)
    tab.get_by_label("Agent").fill("my_agent")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    playwright.expect(tab.get_by_label("Log")).to_contain_text("training", timeout=1000 * PATIENCE_S)
    playwright.expect(tab.locator("#state")).to_have_text("finished", timeout=1000 * PATIENCE_S)
    tab.get_by_role("button", name=re.compile("^promote ")).first.click()
    playwright.expect(tab.get_by_role("region", name="Versions")).to_contain_text("active")
    tab.get_by_role("link", name="Audit").click()
    audit = tab.get_by_role("region", name="Who did what, newest first")
    for action in ("job queued", "job finished", "promote", "project added"):
        playwright.expect(audit).to_contain_text(action)
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


def test_a_wrong_password_is_said_and_the_page_may_not_be_framed(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    """What is refused is told in the words of the API."""
    tab = browser.new_page()
    reply = tab.goto(gateway.url)
    assert reply is not None
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    tab.get_by_label("Name").fill("ada")
    tab.get_by_label("Password").fill("wrong")
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_text("name or password is wrong").wait_for()
