"""Rewards from functions and endpoints: what is a reward, what is none, and what is an error."""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.reward import reward_client
from penstock.workloads.language.reward.reward_client import HttpRewards, RewardClient
from penstock.workloads.language.reward.reward_model import open_source
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    BadSample,
    CallableRewards,
    RewardSource,
    Sample,
    Unavailable,
)

SAMPLES = [Sample(prompt="p", response=text) for text in ("worst", "none", "zero", "half")]
VALUES = {"worst": -1.0, "none": None, "zero": 0.0, "half": 0.5}


def by_name(_prompts: list[Prompt], responses: list[str]) -> list[float | None]:
    """A reward, or none, for each of SAMPLES."""
    return [VALUES[response] for response in responses]


def too_few(_prompts: list[Prompt], _responses: list[str]) -> list[float]:
    """Forgets all but one."""
    return [1.0]


def not_finite(_prompts: list[Prompt], responses: list[str]) -> list[float]:
    """Divides by zero somewhere."""
    return [float("nan")] * len(responses)


def texts(_prompts: list[Prompt], responses: list[str]) -> list[str]:
    """Says it in words."""
    return ["good"] * len(responses)


def nothing(_prompts: list[Prompt], _responses: list[str]) -> None:
    """Returns no list."""


def an_array(_prompts: list[Prompt], responses: list[str]) -> Any:
    """As numpy has them."""
    return np.full(len(responses), -1, np.float32)


def path_of(function: Callable[..., Any]) -> str:
    """As configuration names it."""
    return f"tests.unit.workloads.language.reward.test_reward_source:{function.__name__}"


def test_minus_one_and_zero_are_rewards_and_none_is_none() -> None:
    rewards = CallableRewards(path_of(by_name)).score(SAMPLES)
    assert (-1.0, None, 0.0, 0.5) == rewards.values
    assert path_of(by_name) == rewards.by.name
    assert 64 == len(rewards.by.sha256)
    assert (None, None) == (rewards.by.mean, rewards.by.std)


def test_an_array_is_a_list_of_rewards() -> None:
    assert (-1.0,) * 4 == CallableRewards(path_of(an_array)).score(SAMPLES).values


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (too_few, "1 rewards for 4 samples"),
        (not_finite, "reward 0 is nan"),
        (texts, "reward 0 is 'good'"),
        (nothing, "returned NoneType: return a list"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(BadReward, match=message) as caught:
        CallableRewards(path_of(function)).score(SAMPLES)
    assert path_of(function) in str(caught.value)


Answer = tuple[int, bytes]


@contextmanager
def served(answers: Sequence[Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server that gives these answers in turn, the last one for ever.

    Its URL and what it was sent.
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        """POST only."""

        def do_POST(self) -> None:
            """The next answer."""
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/rewards", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(**fields: Any) -> Answer:
    """200 with JSON."""
    return 200, json.dumps(fields).encode()


def test_an_endpoint_is_sent_text_and_answers_rewards() -> None:
    samples = [*SAMPLES[:3], Sample(prompt=(Message("user", "hello"),), response="half", cut_short=True)]
    with served([reply(rewards=[-1.0, None, 0, 0.5], model="v7")]) as (url, asked):
        source = HttpRewards(url)
        rewards = source.score(samples)
        source.close()
    assert (-1.0, None, 0.0, 0.5) == rewards.values
    assert f"{url} v7" == rewards.by.name
    assert {"prompt": "p", "response": "worst"} == asked[0]["samples"][0]
    turns = [{"role": "user", "content": "hello"}]
    assert {"prompt": turns, "response": "half", "cut_short": True} == asked[0]["samples"][3]


def test_calls_of_an_endpoint_write_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with served([reply(rewards=[0.5])]) as (url, asked):
        source = HttpRewards(url)
        for _ in range(3):
            source.score(SAMPLES[:1])
        source.close()
    assert len(asked) == 3
    assert caplog.records == []


def test_what_may_pass_by_itself_is_asked_again() -> None:
    with served([(503, b""), (429, b""), reply(rewards=[1.0] * 4)]) as (url, asked):
        assert (1.0,) * 4 == HttpRewards(url).score(SAMPLES).values
    assert 3 == len(asked)


def test_an_endpoint_that_stays_away_is_unavailable() -> None:
    with served([(500, b"")]) as (url, asked):
        source = HttpRewards(url.replace("//", "//ada:secret@"), deadline_s=0.5)
        with pytest.raises(Unavailable, match="no answer within 0.5 s: status 500") as caught:
            source.score(SAMPLES)
    assert asked
    assert "secret" not in str(caught.value)
    with pytest.raises(Unavailable):
        HttpRewards("http://127.0.0.1:1/", deadline_s=0.2).score(SAMPLES)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((400, b"prompt is empty"), BadSample, "status 400: prompt is empty"),
        ((302, b""), BadSample, "status 302"),
        ((200, b"<html>"), BadReward, "no JSON"),
        ((200, b"[1, 2]"), BadReward, "no object"),
        (reply(scores=[1]), BadReward, "no list `rewards`"),
        (reply(rewards=[1.0]), BadReward, "1 rewards for 4 samples"),
        (reply(rewards=[1.0, True, 1.0, 1.0]), BadReward, "reward 1 is True"),
        ((200, b'{"rewards": [NaN, 1, 1, 1]}'), BadReward, "reward 0 is nan"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(answer: Answer, kind: type[Exception], message: str) -> None:
    with served([answer]) as (url, asked), pytest.raises(kind, match=message):
        HttpRewards(url).score(SAMPLES)
    assert 1 == len(asked)


def test_a_reply_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_client, "MAX_REPLY_BYTES", 1000)
    with served([(200, b" " * 5000)]) as (url, _), pytest.raises(BadReward, match="above 1000 bytes"):
        HttpRewards(url).score(SAMPLES)


def test_a_source_is_opened_by_its_name(tmp_path: Path) -> None:
    kinds: dict[str, type[RewardSource]] = {
        "http://127.0.0.1:1/": HttpRewards,
        "grpc://127.0.0.1:1": RewardClient,
        f"unix:{tmp_path}/socket": RewardClient,
        path_of(by_name): CallableRewards,
    }
    for text, kind in kinds.items():
        source = open_source(text)
        assert isinstance(source, kind)
        source.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "name a reward model's folder"),
        ("./gone", "name a reward model's folder"),
        ("http://", "write http://HOST/PATH"),
        ("grpc://far", "write HOST:PORT"),
        ("grpc://far.example:1", "plaintext beyond loopback"),
        ("json:no_such_function", "cannot be loaded"),
    ],
)
def test_a_name_of_no_source_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_source(text)
