"""The page of goals in a real browser: from a training to an injector that lives by what it learned.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the pictures of docs/goals.md there.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import read_endpoint
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.gateway.gateway_stand import PASSWORD, end_jobs, operator
from tests.support.run.harness import PATIENCE_S, GatewayProcess, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.timeout(600)]
TEMPLATES = Path(__file__).resolve().parents[3] / "penstock" / "recipes" / "service"
POINTS = "() => (document.querySelector('.curve polyline')?.getAttribute('points') ?? '').split(' ').length"


@pytest.fixture
def browser() -> Iterator["Browser"]:
    """A browser."""
    with chromium() as started:
        yield started


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway with the template of goals, an editor and a viewer of `alpha`."""
    (tmp_path / "templates").mkdir()
    # What is to be cancelled is not over because it was learned.
    template = (TEMPLATES / "goals.toml").read_text()
    template = template.replace("[learner]", "[learner]\nstop_at_target = false")
    (tmp_path / "templates" / "goals.toml").write_text(template)
    for name, role in (("ada", "owner"), ("vic", "viewer")):
        done = operator(
            tmp_path, "user", "add", name, "--project", "alpha", "--role", role, stdin=f"{PASSWORD}\n"
        )
        assert done.returncode == 0, done.stderr
    with GatewayProcess(tmp_path, "--templates", "templates") as started:
        yield started
    end_jobs(tmp_path)


@contextmanager
def program(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command that goes on meanwhile."""
    with subprocess.Popen(penstock(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def served(folder: Path, run: Path) -> Iterator[str]:
    """A policy server of a run; its address."""
    endpoints = folder / "served.json"
    with program("serve", "--run", str(run), "--listen", "127.0.0.1:0", "--endpoints", str(endpoints)):
        eventually(lambda: read_endpoint(endpoints), "a policy server", within_s=PATIENCE_S)
        found = read_endpoint(endpoints)
        assert found is not None
        yield found.address


def signed_in(browser: "Browser", gateway: GatewayProcess, name: str, complaints: list[str]) -> "Page":
    """A tab of the page, on a phone's width in the dark, in which somebody has signed in by the keyboard."""
    tab = open_tab(browser, gateway.url, complaints, "/rl")
    tab.get_by_label("Name", exact=True).fill(name)
    tab.get_by_label("Name", exact=True).press("Tab")
    tab.keyboard.type(PASSWORD)
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Injectors").wait_for()
    return tab


def test_from_parameters_to_a_goal_that_was_vetoed_and_one_that_was_done(
    browser: "Browser", gateway: GatewayProcess, tmp_path: Path
) -> None:
    complaints: list[str] = []
    tab = signed_in(browser, gateway, "ada", complaints)
    run = train(tab, tmp_path)
    folder = tmp_path / "gateway-state" / "injectors" / "alpha" / "host"
    with (
        served(tmp_path, run) as address,
        program(
            "inject", "--server", address, "--policy", "alpha/my_host", "--simulated", "1",
            "--folder", str(folder), "--interval", "1",
            "--veto-s", "4", "--threshold", "0", "--seed", "0",
        ),
    ):  # fmt: skip
        eventually((folder / "pulse.json").exists, "the injector", within_s=PATIENCE_S)
        inject(tab)
        watch(signed_in(browser, gateway, "vic", complaints))
    tab.goto(f"{gateway.url}/#/alpha/audit")
    audit = tab.get_by_role("region", name="Who did what, newest first")
    for action in ("injector switched", "goal vetoed", "promote", "weights read", "job cancelled"):
        expect(audit).to_contain_text(action)
    assert complaints == []


def train(tab: "Page", folder: Path) -> Path:
    """A training is started by the form, its curve moves, it is ended, a version is promoted; its folder."""
    tab.get_by_label("Agent").fill("my_host")
    tab.get_by_label("totalSteps").fill("10000000")
    check_look(tab, "goals-overview")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_role("heading", name="Training of my_host").wait_for()
    tab.wait_for_function(f"() => ({POINTS})() > 4")
    seen = tab.evaluate(POINTS)
    tab.wait_for_function(f"() => ({POINTS})() > {seen}")
    (job,) = (folder / "gateway-state" / "jobs").glob("*/run")
    eventually(lambda: list((job / "policies").glob("*")), "a version", within_s=PATIENCE_S)
    tab.get_by_role("button", name="cancel").click()
    expect(tab.locator("#state")).to_have_text("cancelled", timeout=1000 * PATIENCE_S)
    tab.get_by_role("button", name=re.compile("^promote ")).first.click()
    expect(tab.get_by_role("region", name="Versions")).to_contain_text("active")
    with tab.expect_download() as kept:
        tab.get_by_role("button", name=re.compile("^download ")).first.click()
    name = kept.value.suggested_filename
    assert re.fullmatch(r"alpha-my_host-\d+\.safetensors", name), name
    version = name.removesuffix(".safetensors").rpartition("-")[2]
    assert kept.value.path().read_bytes() == (job / "policies" / f"{version}.safetensors").read_bytes()
    check_look(tab, "goals-training")
    tab.get_by_role("link", name="Overview").click()
    return job


def inject(tab: "Page") -> None:
    """It proposes alone, is switched on, one goal is vetoed, others are done, and it is switched off."""
    tab.get_by_role("heading", name="Start a training").wait_for()
    tab.get_by_role("link", name="host", exact=True).first.click()
    tab.get_by_role("heading", name="Injector host").wait_for()
    state = tab.locator("#state")
    expect(state).to_contain_text("running, only proposes")
    tab.get_by_role("button", name="Carry goals out").click()
    expect(state).to_contain_text("running, carries goals out")
    tab.get_by_role("button", name=re.compile("^veto ")).first.click()
    goals = tab.get_by_role("region", name="The last twenty goals, newest first")
    expect(goals).to_contain_text("; veto")
    expect(goals).to_contain_text(re.compile("success|failure"))
    check_look(tab, "goals-injector")
    tab.get_by_role("button", name="Only propose").click()
    expect(state).to_contain_text("running, only proposes")


def watch(tab: "Page") -> None:
    """A viewer sees all of it."""
    assert tab.get_by_role("heading", name="Start a training").count() == 0
    tab.get_by_role("region", name="Injectors").get_by_role("link", name="host").click()
    tab.get_by_role("heading", name="Injector host").wait_for()
    expect(tab.get_by_role("img")).to_have_attribute("aria-label", re.compile("goals by certainty"))
    for name in ("Carry goals out", re.compile("^veto ")):
        assert tab.get_by_role("button", name=name).count() == 0
