"""People train from their own ratings in a real browser: from an invitation to a rollback."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")
pytest.importorskip("peft", reason="language models need the extra rlhf")

import httpx2

from tests.processes.gateway.test_console_in_browser import (
    POINTS,
    browser,
    decide,
    invitation,
    rate,
    sign_up,
    signed_in,
)
from tests.processes.gateway.test_gateway_process import PASSWORD, operator
from tests.support.browser.tabs import check_look, expect, needs_chromium, open_tab
from tests.support.gateway.job_templates import end_jobs, write_tiny
from tests.support.run.harness import PATIENCE_S, GatewayProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.timeout(1200)]
HIDDEN: Final = (
    "/api/projects/alpha",
    "/api/projects/alpha/members",
    "/api/projects/alpha/audit",
    "/api/projects/alpha/jobs",
    "/api/projects/alpha/events?job=",
    "/api/projects/alpha/agents/my_agent/feedback",
    "/api/projects/alpha/agents/my_agent/satisfaction",
)
"""Addresses of a project and its agent, which are nobody else's."""
HIDDEN_OF_A_JOB: Final = ("", "/log", "/curve", "/versions")
PAGES: Final = {"feedback": "Feedback", "people": "People", "audit": "Audit", "jobs": "Jobs"}
"""Pages of the console by their address, and the heading of each."""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that trains from feedback, with an owner of `alpha` and one of `beta`."""
    write_tiny(tmp_path / "templates")
    for name, project in (("ada", "alpha"), ("bob", "beta")):
        done = operator(tmp_path, "user", "add", name, "--project", project, stdin=f"{PASSWORD}\n")
        assert done.returncode == 0, done.stderr
    with GatewayProcess(tmp_path, "--templates", "templates", "--models", "models") as started:
        yield started
    end_jobs(tmp_path)


def test_from_ratings_to_a_version_that_is_rolled_back(
    browser: "Browser",
    gateway: GatewayProcess,
    tmp_path: Path,
) -> None:
    complaints: list[str] = []
    owner = signed_in(browser, gateway, "ada", complaints)
    tab = open_tab(browser, gateway.url, complaints)
    sign_up(tab, invitation(owner))
    rate(tab)
    job = look_and_train(tab)
    is_listed(tab, tmp_path)
    decide(tab)
    owner.get_by_role("link", name="Audit").click()
    audit = owner.get_by_role("region", name="Who did what, newest first")
    for action in ("member set", "job queued", "job finished", "promote", "weights read", "roll back"):
        expect(audit).to_contain_text(action)
    refused: list[str] = []
    finds_nothing(signed_in(browser, gateway, "bob", refused), gateway, job)
    assert complaints == []
    assert [one for one in refused if "404" not in one] == []


def look_and_train(tab: "Page") -> str:
    """By the keyboard: what it would take and learn from, and then it; returns the job's id."""
    tab.get_by_role("link", name="Jobs").press("Enter")
    tab.get_by_role("heading", name="Start a training").wait_for()
    tab.get_by_label("Agent", exact=True).fill("my_agent")
    tab.get_by_role("button", name="Estimate").press("Enter")
    told = tab.get_by_label("Estimate")
    expect(told).to_contain_text(re.compile(r"About [\d.]+ minutes, with"), timeout=1000 * PATIENCE_S)
    expect(told).to_contain_text("It learns from 12 ratings, 0.50 ± 0.34.")
    check_look(tab, "console-estimate")
    tab.get_by_role("button", name="Start").press("Enter")
    tab.get_by_role("heading", name="Training of my_agent").wait_for()
    job = tab.url.rpartition("/")[2]
    tab.wait_for_function(f"() => ({POINTS})() > 2")
    seen = tab.evaluate(POINTS)
    expect(tab.locator("#state")).to_have_text("finished", timeout=1000 * PATIENCE_S)
    tab.wait_for_function(f"() => ({POINTS})() > {seen}")
    return job


def is_listed(tab: "Page", folder: Path) -> None:
    """The version has its label, and the models lie where the page says."""
    result = tab.get_by_role("region", name="Result")
    expect(result).to_contain_text("v12")
    expect(tab.get_by_role("region", name="Versions", exact=True)).to_contain_text("v12 (")
    place = result.get_by_role("row").filter(has_text=re.compile("^modelPath")).get_by_role("cell").last
    assert (folder / (place.text_content() or "") / "adapter_model.safetensors").is_file()


def finds_nothing(tab: "Page", gateway: GatewayProcess, job: str) -> None:
    """Neither on a page of that address, nor by a call of their own."""
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
