"""A real run seen from outside, by `penstock status`, by the page's JSON and in a browser.

With PENSTOCK_SCREENSHOTS=FOLDER the browser leaves the pictures of docs/inspection.md there."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.browser.tabs import chromium, needs_chromium, take_picture, violations
from tests.support.run import harness
from tests.support.run.harness import LONG, PATIENCE_S, Training, command, is_alive

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ViewportSize


pytest.importorskip("fastapi", reason="the page needs the extra `ui`")

HOPS = (
    *("environment_steps", "fragments_sent", "ack_s", "fragments_appended", "append_s"),
    *("trained_steps", "updates", "staleness", "versions"),
)
ROLES = ("actor", "evaluator", "broker", "redis", "learner", "launcher")
SHORT = ("--total-steps", "3000", "--set", "evaluation.episodes=5")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("runs") / "watched"
    with harness.run(folder, "CartPole-v1", "--ui", *LONG) as training:
        training.until_steps(5_000)
        yield training


def status(training: Training) -> dict[str, Any]:
    return dict(json.loads(command("status", str(training.run_dir), "--json").stdout))


def asked(training: Training, path: str) -> Any:
    address = training.endpoints()["launcher"]["address"]
    with urllib.request.urlopen(address.partition("#")[0] + path, timeout=PATIENCE_S) as reply:  # noqa: S310 - http
        return json.loads(reply.read())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_status_shows_rates_versions_and_health_of_every_role(watched: Training) -> None:
    seen: dict[str, Any] = {}

    def all_flows() -> bool:
        """A second without an update is rare, and no mistake; neither is an evaluator that starts late."""
        seen.update(status(watched))
        return all(seen["flow"][hop] for hop in HOPS) and len(seen["roles"]) == len(ROLES)

    watched.until(all_flows)
    roles = {row["role"]: row for row in seen["roles"]}
    assert tuple(roles) == ROLES
    assert all(row["healthy"] == row["of"] and not row["problems"] for row in roles.values())
    assert roles["actor"]["of"] == 2
    assert roles["learner"]["version"] == str(seen["flow"]["version"])
    assert seen["bottleneck"]["bound"] != "not measured"
    assert "the learner waits" in seen["bottleneck"]["reason"]
    assert seen["run"].startswith("cartpole-v1-")


def test_the_readable_status_begins_with_the_bottleneck(watched: Training) -> None:
    reply = command("status", str(watched.run_dir))
    first, _, rest = reply.stdout.partition("\n")
    assert "-bound: " in first or first.startswith("balanced: ")
    assert "steps/s" in rest
    assert "versions behind" in rest or "version behind" in rest


@pytest.mark.parametrize(("role", "bound"), [("learner", "learner-bound"), ("broker", "broker-bound")])
def test_a_stalled_process_is_named_as_the_bottleneck(watched: Training, role: str, bound: str) -> None:
    name = watched.run_dir.name
    with stopped(watched.pids()[role]):
        verdict = status(watched)["bottleneck"]
        assert verdict["bound"] == bound
        assert verdict["stands_still"]
        assert f"{role} stands still: stopped by a signal" in verdict["reason"]
        watched.until(lambda: asked(watched, f"api/runs/{name}")["now"]["bottleneck"]["bound"] == bound)
    watched.until(lambda: not asked(watched, f"api/runs/{name}")["now"]["bottleneck"]["stands_still"])


def test_the_page_ends_with_its_run(tmp_path: Path) -> None:
    with harness.run(tmp_path / "short", "CartPole-v1", "--ui", *SHORT, "--json") as training:
        code, out, err = training.end()
    assert code == 0, err
    assert "Logging error" not in err
    assert json.loads(out)["env_steps"] >= 3000
    reply = command("status", str(training.run_dir))
    assert reply.returncode == 1
    assert "the run has ended" in reply.stderr


LONGER = ("--total-steps", "30000", "--set", "evaluation.episodes=5")
DESK: "ViewportSize" = {"width": 1440, "height": 1000}
NEWEST_STEP = (
    "() => Number(document.querySelector('#tiles div:nth-child(3) dd').textContent.replaceAll(',', ''))"
)

DRAWN = "() => document.querySelector('#return canvas').toDataURL()"
CURVES = """() => {
  const from = document.querySelector('#return canvas');
  if (from === null) return 0; // a chart is drawn anew when a run is added to it
  const copy = Object.assign(document.createElement('canvas'), { width: from.width, height: from.height });
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(from, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer);
  const colours = [...Array(8).keys()].map((index) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--s${index}`).trim());
  return colours.filter((colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return pixels.includes(((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0);
  }).length;
}"""
"""Of the colours of curves those that the chart of the return shows."""


class Screen:
    """A tab, and everything that it complained about or asked for elsewhere."""

    def __init__(self, browser: "Browser", url: str) -> None:
        self.tab = browser.new_page(viewport=DESK, color_scheme="light", reduced_motion="reduce")
        self.tab.set_default_timeout(1000 * PATIENCE_S)
        self.complaints: list[str] = []
        origin = url.partition("#")[0].partition("?")[0]
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on(
            "request",
            lambda asked: None if asked.url.startswith(origin) else self.complaints.append(asked.url),
        )
        self.tab.goto(url)
        self.tab.wait_for_selector("#return canvas")

    def until(self, condition: str) -> None:
        self.tab.wait_for_function(condition)

    def picture(self, name: str, *, whole: bool = True) -> None:
        take_picture(self.tab, name, whole=whole)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with harness.run(tmp_path / "runs" / "first", "CartPole-v1", "--seed", "7", *LONGER) as first:
        assert first.end()[0] == 0
    with harness.run(tmp_path / "runs" / "second", "CartPole-v1", "--ui", *LONG) as training:
        training.until_steps(20_000)
        yield training


@needs_chromium
@pytest.mark.timeout(300)
def test_a_person_watches_a_run(training: Training) -> None:
    url = training.endpoints()["launcher"]["address"]
    with chromium() as browser:
        screen = Screen(browser, url)
        see_the_curve_move(screen)
        see_what_flows(screen)
        compare_runs(screen)
        read_with_the_keyboard(screen)
        see_it_small_and_dark(screen)
        see_a_learner_that_stands_still(screen, training.pids()["learner"])
        assert screen.complaints == []
        see_a_learner_that_was_killed(browser, training)
        ask_for_a_run_that_is_not_there(browser, url)


def see_the_curve_move(screen: Screen) -> None:
    tab = screen.tab
    assert tab.text_content("#name") == "second"
    assert tab.text_content("#state") == "running"
    drawn, steps = tab.evaluate(DRAWN), tab.evaluate(NEWEST_STEP)
    screen.until(f"() => ({NEWEST_STEP})() > {steps}")
    screen.until(f"() => ({DRAWN})() !== {json.dumps(drawn)}")


def see_what_flows(screen: Screen) -> None:
    screen.until("() => document.querySelectorAll('.hop.moving').length === 4")
    screen.until(
        "() => /(bound|balanced): the learner waits/.test(document.querySelector('#verdict').textContent)"
    )
    assert screen.tab.locator("#roles tbody tr").count() == 6


def compare_runs(screen: Screen) -> None:
    """Two curves, two names, two rows; the address keeps the choice."""
    screen.tab.get_by_label("Compare first").check()
    screen.until(f"() => ({CURVES})() === 2")
    assert screen.tab.locator("#legend li").all_text_contents() == ["second", "first"]
    assert screen.tab.locator("#comparison tbody tr").count() == 2
    assert screen.tab.url.endswith("?with=first")
    screen.tab.hover("#return .plot", position={"x": 420, "y": 160})
    screen.picture("page-running")


def read_with_the_keyboard(screen: Screen) -> None:
    """Arrow keys move along the curve; Escape lets go."""
    screen.tab.focus("#rate .plot")
    screen.tab.keyboard.press("ArrowLeft")
    assert "steps" in (screen.tab.text_content("#rate .tip strong") or "")
    screen.tab.keyboard.press("Escape")
    assert not screen.tab.is_visible("#rate .tip")
    screen.tab.evaluate("() => document.activeElement.blur()")


def see_a_learner_that_stands_still(screen: Screen, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        screen.until(
            "() => document.querySelector('#verdict').textContent"
            ".startsWith('learner-bound: learner stands still: stopped by a signal; no update for')"
        )
        screen.until("() => document.querySelector('.stage.stuck h4')?.textContent === 'Learner'")
        screen.picture("page-stalled")
    finally:
        os.kill(pid, signal.SIGCONT)
    screen.until("() => !document.querySelector('#verdict').textContent.includes('stands still')")


def see_a_learner_that_was_killed(browser: "Browser", training: Training) -> None:
    """Named while its launcher cannot start it again, and counted once it has; the run goes on.

    On the page of `penstock ui`, since the launcher's own stands still with it.
    """
    learner = (
        "[...document.querySelectorAll('#roles tbody tr')].find(row => row.cells[0].textContent === "
        "'learner')"
    )
    with page_of(training.run_dir.parent) as url:
        screen = Screen(browser, f"{url}#/run/{training.run_dir.name}")
        training.process.send_signal(signal.SIGSTOP)
        try:
            os.kill(training.pids()["learner"], signal.SIGKILL)
            screen.until(
                "() => document.querySelector('#verdict').textContent"
                ".startsWith('learner-bound: learner has ended; no update for')"
            )
            screen.until("() => document.querySelector('.stage.stuck h4')?.textContent === 'Learner'")
            steps = screen.tab.evaluate(NEWEST_STEP)
        finally:
            training.process.send_signal(signal.SIGCONT)
        screen.until(
            f"() => {learner}.cells[2].textContent === 'ok' && {learner}.cells[6].textContent === '1'"
        )
        screen.until(f"() => ({NEWEST_STEP})() > {steps}")
        assert screen.complaints == []
        assert "secret" not in screen.tab.url
        elsewhere = browser.new_context().new_page()
        for address in (url, url.partition("?")[0]):
            reply = elsewhere.goto(address)
            assert reply is not None
            assert reply.status == 401, "another profile"


@contextmanager
def page_of(runs: Path) -> Iterator[str]:
    command = penstock("ui", str(runs), "--listen", "127.0.0.1:0")
    environment = os.environ | {"XDG_STATE_HOME": str(runs.parent / "state")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@needs_chromium
@pytest.mark.timeout(300)
def test_a_person_starts_a_training_in_the_browser_and_stops_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with chromium() as browser, page_of(runs) as url:
        tab = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.goto(url)
        tab.get_by_text("No runs yet").wait_for()
        tab.get_by_role("link", name="Start a training").focus()
        tab.keyboard.press("Enter")
        tab.fill("[name=name]", "mine")
        tab.get_by_text("learner", exact=True).click()
        tab.fill("[name='settings.learner.total_steps']", "0")
        tab.get_by_role("button", name="Start", exact=True).click()
        tab.get_by_role("alert").get_by_text("learner.total_steps=0").wait_for()
        assert tab.evaluate("document.activeElement.name") == "settings.learner.total_steps"
        assert list(runs.iterdir()) == []
        assert violations(tab) == []
        tab.fill("[name='settings.learner.total_steps']", "100000000")
        tab.select_option("[name='settings.learner.stop_at_target']", "false")
        try:
            tab.get_by_role("button", name="Start", exact=True).click()
            tab.wait_for_selector("#state:text('running')")
            tab.wait_for_function(f"() => ({NEWEST_STEP})() > 0")
            assert tab.text_content("#name") == "mine"
            assert violations(tab) == []
            tab.get_by_role("button", name="stop", exact=True).click()
            tab.get_by_text("stop: asked for").wait_for()
            tab.wait_for_selector("#state:text('interrupted')")
            assert json.loads((runs / "mine" / "summary.json").read_text())["interrupted"]
        finally:
            kill_what_is_left(runs / "mine")


def kill_what_is_left(run: Path) -> None:
    places = run / "endpoints.json"
    if places.exists():
        launcher = json.loads(places.read_text())["launcher"]["pid"]
        if is_alive(launcher):
            os.kill(launcher, signal.SIGKILL)  # its children drain by themselves


def see_it_small_and_dark(screen: Screen) -> None:
    tab = screen.tab
    tab.get_by_label("Compare first").uncheck()
    screen.until(f"() => ({CURVES})() === 1")
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.emulate_media(color_scheme="dark")
    screen.until("() => document.documentElement.dataset.theme === 'dark'")
    screen.until("() => document.documentElement.scrollWidth <= window.innerWidth")
    screen.picture("page-small")
    tab.set_viewport_size(DESK)
    screen.picture("page-dark")
    tab.click("#theme")
    assert tab.evaluate("() => document.documentElement.dataset.theme") == "light"


def ask_for_a_run_that_is_not_there(browser: "Browser", url: str) -> None:
    tab = browser.new_page()
    tab.goto(url.partition("#")[0] + "#/run/..%2Fnowhere")
    tab.wait_for_selector("#empty h2:text('No such run')")
    assert tab.locator("#runs li").count() == 2
