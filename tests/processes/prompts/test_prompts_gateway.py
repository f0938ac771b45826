"""`penstock gateway prompts` and its run: stored, updated, gone back, killed, ended."""

import os
import signal
from pathlib import Path

import pytest
import requests

from tests.support.prompts.prompts_gateway import SMALL, PromptsGateway

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


@pytest.mark.slow
def test_a_killed_policy_server_takes_open_steps_with_it_and_no_others(tmp_path: Path) -> None:
    with PromptsGateway(tmp_path, *SMALL) as gateway:
        gateway.play(PROMPT.format(0), steps=3, is_whole=False)
        os.kill(gateway.process_of("server").pid, signal.SIGKILL)
        gateway.await_healthy()
        for number in range(1, 27):
            gateway.play(PROMPT.format(number))
        made = gateway.post("/update")
        assert (made["steps"], made["update_count"]) == (130, 1)
        assert gateway.get("/stats")["open_chains"] == 0
        assert gateway.end() == 0, gateway.said()
    assert gateway.summary()["ledger"]["balanced"]


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
def test_what_cannot_be_served_is_told_at_once(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    gateway = PromptsGateway(tmp_path, *words)
    assert gateway.process.wait(120) == 2
    assert said in gateway.said()
