"""`penstock gateway prompts` and its run: described, stored, updated, gone back, killed, ended; and its page.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the picture of docs/prompts.md there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import requests

from penstock.registry.registry import Registry
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.prompts.json_server import JsonServer
from tests.support.prompts.prompts_gateway import SMALL, PromptsGateway
from tests.support.serving import node_client

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FIGURES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "learning_rate")
NOTHING = [0.0] * 1536
PROMPT = "Write a function that sorts a list of {} numbers"


def test_transitions_are_learned_from_and_the_books_balance(tmp_path: Path) -> None:
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        assert gateway.get("/stats") == {"message": "No training data yet"}
        gateway.play(PROMPT.format(0))
        assert gateway.post("/update")["message"] == "Not enough experiences"
        for number in range(1, 25):
            gateway.play(PROMPT.format(number))
        gateway.play(PROMPT.format(25), steps=3)
        saved = gateway.post("/save", path="before-the-update")
        made = gateway.post("/update")
        assert (made["steps"], made["update_count"], made["buffer_size"]) == (128, 1, 0)
        assert all(isinstance(made[name], float) for name in FIGURES)
        stats = gateway.get("/stats")
        assert (stats["total_updates"], stats["total_episodes"]) == (1, 26)
        assert (stats["open_chains"], stats["unverified"], stats["lost"]) == (0, 0, 0)
        taken = requests.post(f"{gateway.url}/save", json={"path": saved["path"]}, timeout=60)
        assert (taken.status_code, taken.json()["field"]) == (409, "path")
        assert str(tmp_path) not in taken.json()["detail"]
        gateway.play(PROMPT.format(26), steps=2)
        loaded = gateway.post("/load", path=saved["path"])
        assert loaded["version"] > made["version"]
        assert (loaded["given_up"], gateway.get("/stats")["buffer_size"]) == (2, 0)
        absent = requests.post(f"{gateway.url}/load", json={"path": "absent"}, timeout=60)
        assert (absent.status_code, absent.json()["error"]) == (404, "File not found")
        assert gateway.end() == 0, gateway.said()
    summary = gateway.summary()
    assert summary["ledger"]["balanced"]
    assert (summary["env_steps"], summary["updates"]) == (128, 1)


def test_a_killed_gateway_finds_its_run_again(tmp_path: Path) -> None:
    with PromptsGateway(tmp_path, *SMALL) as first:
        try:
            for number in range(26):
                first.play(PROMPT.format(number))
            version = first.post("/update")["version"]
            answer = first.post("/select_action", embedding=NOTHING)
            told = {name: answer[name] for name in ("action", "log_prob", "value", "ticket")}
            transition = told | {"state": NOTHING, "reward": 0.0, "next_state": NOTHING, "done": True}
            assert first.post("/store_experience", **transition)["verified"]
            first.kill()
            with PromptsGateway(tmp_path) as second:
                again = requests.post(f"{second.url}/store_experience", json=transition, timeout=60)
                assert (again.status_code, again.json()["field"]) == (409, "ticket")
                assert second.post("/select_action", embedding=NOTHING)["version"] == version
                assert second.get("/stats")["total_updates"] == 1
                assert second.end() == 0, second.said()
        finally:
            first.end_run()
    with PromptsGateway(tmp_path) as third:
        assert third.get("/stats")["total_updates"] == 1
        third.play(PROMPT.format(99))
    assert third.summary()["ledger"]["balanced"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run", "nowhere"), "no folder of a run"),
        (("--server", "nonsense"), "--server"),
        (("--broker", "127.0.0.1:1"), "belongs to --server"),
        (("--recipe", "nowhere.toml"), "no such file"),
        (("--listen", "0.0.0.0:0", "--insecure"), "--project"),
    ],
)
def test_an_unservable_run_is_refused_at_once(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    gateway = PromptsGateway(tmp_path, *words)
    assert gateway.process.wait(120) == 2
    assert said in gateway.said()


CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
LEAST: Final = 300


@pytest.mark.timeout(600)
def test_generated_calls_are_answered_as_described(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="what generates the calls")
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        words = (
            *("run", f"{gateway.url}/openapi.json", "--seed", "7", "--no-color"),
            *("--checks", ",".join(CHECKS), "--max-examples", "30", "--phases", "fuzzing"),
            *("--generation-database", "none"),
        )
        done = subprocess.run(
            [str(Path(sys.executable).with_name("st")), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        told = done.stdout[-8000:] + done.stderr[-2000:]
        assert done.returncode == 0, told
        counted = re.search(r"(\d+) generated", done.stdout)
        assert counted is not None, told
        assert int(counted[1]) >= LEAST, told
        assert gateway.get("/health") == {"status": "ok"}
        assert gateway.end() == 0, gateway.said()
    assert "a request failed" not in gateway.log.read_text()
    assert gateway.summary()["ledger"]["balanced"]


ROOT: Final = Path(__file__).resolve().parents[3]
PACKAGE: Final = ROOT / "clients" / "typescript"


@pytest.mark.timeout(1200)
def test_the_suite_of_the_typescript_client_passes() -> None:
    node_client.install(PACKAGE)
    done = subprocess.run(
        ["npm", "test"],
        cwd=PACKAGE,
        env=os.environ | {"VIRTUAL_ENV": str(Path(sys.prefix))},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "DIRECTIVE-023" in done.stdout


WORDY = "Please, could you write a function that sorts a list? <script>alert(1)</script> Thanks a lot!"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as started:
        yield started


def look(tab: "Page", prompt: str) -> None:
    """Paste a prompt, by the keyboard alone."""
    tab.get_by_label("Prompt", exact=True).last.fill(prompt)
    tab.get_by_label("Prompt", exact=True).last.press("Tab")
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Mutations").wait_for()


@needs_chromium
@pytest.mark.timeout(600)
def test_a_person_reads_and_rates_a_prompt(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        tab = open_tab(browser, gateway.url, complaints, "/prompts")
        look(tab, WORDY)
        expect(tab.locator("#category")).to_have_text("CODE_GENERATION")
        table = tab.get_by_role("region", name="How likely each mutation is")
        expect(table.get_by_role("row")).to_have_count(6)
        tab.get_by_text("What context-reduction does").click()
        expect(tab.locator("details[open] del").first).to_contain_text("Please")
        tab.get_by_role("button", name="Draw another path").click()
        tab.get_by_role("heading", name="A path that was drawn").wait_for()
        steps = tab.get_by_role("region", name="A path that was drawn, reward by step").get_by_role("row")
        expect(steps).to_have_count(6)
        tab.get_by_role("button", name="4 of 5").click()
        expect(tab.locator("#rated")).to_have_text("Kept: 4 of 5.")
        check_look(tab, "prompts-page")
        with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
            (kept,) = registry.ratings("default")
        assert (kept.rating.score, "<script>" in str(kept.rating.prompt)) == (0.75, True)
        look(tab, "x")
        expect(tab.locator("#notice")).to_be_empty()
    assert complaints == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_person_checks_the_rewards_of_a_program(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    lengths = lambda body: {"rewards": [len(one["response"]) / 100 for one in body["samples"]]}  # noqa: E731
    with JsonServer(lengths) as source:
        task = f'{{reward_source = "{source.url}/score", human_check_every = 2}}'
        with PromptsGateway(tmp_path, *SMALL, f"--train=environment.kwargs={task}") as gateway:
            tab = open_tab(browser, gateway.url, complaints, "/prompts")
            for action in (0, 2):
                assert gateway.post("/mutate", prompt=WORDY, action=action)["reward"] > 0
            tab.reload()
            tab.get_by_role("button", name="The one after is better").click()
            expect(tab.locator("#checks")).to_contain_text("agreed with 1 of 1")
            check_look(tab, "prompts-checks")
            with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
                (kept,) = registry.ratings("default")
            assert kept.rating.rejected is not None
        assert gateway.summary()["ledger"]["balanced"]
    assert complaints == []
