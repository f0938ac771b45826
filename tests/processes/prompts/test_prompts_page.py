"""The page of one prompt in a real browser, headless: looked at, drawn, rated.

With PENSTOCK_SCREENSHOTS=FOLDER it leaves the picture of docs/prompts.md there.
"""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

import pytest

from penstock.registry.registry import Registry
from tests.support.browser.tabs import check_look, chromium, expect, needs_chromium, open_tab
from tests.support.prompts.prompts_gateway import SMALL, PromptsGateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium, pytest.mark.timeout(600)]
PROMPT = "Please, could you write a function that sorts a list? <script>alert(1)</script> Thanks a lot!"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser."""
    with chromium() as started:
        yield started


def look(tab: "Page", prompt: str) -> None:
    """Paste a prompt, by the keyboard alone."""
    tab.get_by_label("Prompt", exact=True).last.fill(prompt)
    tab.get_by_label("Prompt", exact=True).last.press("Tab")
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Mutations").wait_for()


def test_a_prompt_is_looked_at_and_rated(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        tab = open_tab(browser, gateway.url, complaints, "/prompts")
        look(tab, PROMPT)
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


@pytest.mark.slow
def test_ratings_are_learned_from(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    with PromptsGateway(tmp_path, *SMALL, "--train=environment.kwargs.reward=ratings") as gateway:
        tab = open_tab(browser, gateway.url, complaints, "/prompts")
        look(tab, PROMPT)
        tab.get_by_role("heading", name="A path that was drawn").wait_for()
        tab.get_by_role("button", name="5 of 5").click()
        expect(tab.locator("#rated")).to_contain_text("5 steps wait to be learned from")
        assert gateway.get("/stats")["buffer_size"] == 5
    assert gateway.summary()["ledger"]["balanced"]
    assert complaints == []


@pytest.mark.slow
def test_a_person_checks_the_rewards_of_a_program(browser: "Browser", tmp_path: Path) -> None:
    complaints: list[str] = []
    with LengthRewards() as source:
        task = f'{{reward_source = "{source.url}", human_check_every = 2}}'
        with PromptsGateway(tmp_path, *SMALL, f"--train=environment.kwargs={task}") as gateway:
            tab = open_tab(browser, gateway.url, complaints, "/prompts")
            for action in (0, 2):
                assert gateway.post("/mutate", prompt=PROMPT, action=action)["reward"] > 0
            tab.reload()
            tab.get_by_role("button", name="The one after is better").click()
            expect(tab.locator("#checks")).to_contain_text("agreed with 1 of 1")
            check_look(tab, "prompts-checks")
            with Registry.read(f"sqlite:///{gateway.state}/run/registry.sqlite") as registry:
                (kept,) = registry.ratings("default")
            assert kept.rating.rejected is not None
        assert gateway.summary()["ledger"]["balanced"]
    assert complaints == []


class LengthRewards:
    """An endpoint that rewards long texts, as docs/prompts.md says what one answers."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """A hundredth for each character."""
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps({"rewards": [len(one["response"]) / 100 for one in asked["samples"]]})
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
