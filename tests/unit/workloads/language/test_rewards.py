import asyncio
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import TrainerCallback

from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.refusal import Reason, Refused
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import open_channel
from penstock.runtime import metrics
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.v1 import reward_pb2 as pb
from penstock.workloads.language.feedback import Judged, Preference, Source, parse_scale
from penstock.workloads.language.prompt import Message, Prompt
from penstock.workloads.language.reward import reward_client, reward_service
from penstock.workloads.language.reward import training as fitting
from penstock.workloads.language.reward.heads import parse_heads, read_opinions, split_opinions, to_opinions
from penstock.workloads.language.reward.reward_client import HttpRewards, RewardClient
from penstock.workloads.language.reward.reward_model import RewardModel, open_source
from penstock.workloads.language.reward.reward_service import CALLS, Batcher, main
from penstock.workloads.language.reward.reward_source import (
    MAX_REWARD_SAMPLES,
    BadReward,
    BadSample,
    CallableRewards,
    RewardSource,
    Sample,
    Unavailable,
)
from penstock.workloads.language.reward.training import Order, loss_of, train
from penstock.workloads.language.settings import RewardTraining, training_settings
from penstock.workloads.rlhf.sentiment import Sentiment
from tests.support.language.known_sentiment import pairs as pairs_of
from tests.support.language.tiny_models import make_reward_model, samples
from tests.support.run.harness import reward_endpoint

PATIENCE_S = 60.0
SCORE = "/penstock.v1.RewardService/Score"


@dataclass(frozen=True)
class Served:
    address: str
    scores: list[float]


@pytest.fixture
def server(base: Path, tmp_path: Path, short_folder: Path) -> Iterator[Served]:
    scores = make_reward_model(base, tmp_path / "reward")
    address, lifecycle = f"unix:{short_folder}/reward.sock", Lifecycle("reward")
    folder = tmp_path / "reward"
    with ThreadPoolExecutor(1) as threads:
        code = threads.submit(
            main, lifecycle, Settings(), folder=folder, base=None, device="cpu", listen=address
        )
        with open_channel(address, Credentials()) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
        yield Served(address, scores)
        lifecycle.drain("the test is over")
        assert code.result(PATIENCE_S) == 0


@pytest.fixture
def client(server: Served) -> Iterator[RewardClient]:
    opened = RewardClient(server.address, deadline_s=PATIENCE_S)
    yield opened
    opened.close()


def test_a_reward_service_scores_as_its_model_does(server: Served, client: RewardClient) -> None:
    rewards = client.score(samples())
    assert rewards.values == pytest.approx(server.scores, abs=1e-6)
    assert ("reward", 0.25, 2.0) == (rewards.by.name, rewards.by.mean, rewards.by.std)
    assert 64 == len(rewards.by.sha256)
    assert rewards.by == client.describe()
    assert () == client.score([]).values
    with pytest.raises(BadSample, match="--head NAME=SCALE"):
        client.judge(samples()[0])


def test_calls_that_come_at_once_are_scored_together(server: Served, client: RewardClient) -> None:
    before, calls = passes(), 64
    begin = threading.Barrier(calls)

    def call(_index: int) -> Sequence[float | None]:
        begin.wait()
        return client.score(samples()).values

    with ThreadPoolExecutor(calls) as threads:
        for values in threads.map(call, range(calls)):
            assert values == pytest.approx(server.scores, abs=1e-6)
    assert passes() - before < calls


def passes() -> int:
    rows = metrics.exposition("reward").decode().splitlines()
    (row,) = (row for row in rows if row.startswith("penstock_reward_batch_rows_count"))
    return int(float(row.split()[-1]))


def test_a_call_of_more_samples_than_a_request_holds_is_sent_as_several(
    server: Served, client: RewardClient
) -> None:
    values = client.score(samples() * 60).values
    assert 20 * 60 > MAX_REWARD_SAMPLES
    assert values == pytest.approx(server.scores * 60, abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Sample(prompt="tree", response_ids=(4, 99_999)), r"samples\[1\]: token id 99999 of a vocabulary"),
        (Sample(prompt="tree", response="good " * 100), r"samples\[1\]: the response has 101 tokens, 64 fit"),
        (Sample(prompt="x" * 2_000_000, response="good"), r"samples\[1\]: .* bytes, at most"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_named(client: RewardClient, bad: Sample, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        client.score([samples()[0], bad])
    assert client.score(samples()[:1]).values


EMPTY_SAMPLE = b"\x0a\x00"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff", "Score: byte"),
        (EMPTY_SAMPLE * (MAX_REWARD_SAMPLES + 1), "samples: more than 1024"),
        (EMPTY_SAMPLE * 4_000_000, "samples: more than 1024"),
        # One sample of two million empty messages, whose length is a varint of four bytes.
        (b"\x0a\x80\x92\xf4\x01" + b"\x12\x00" * 2_000_000, "fields; send less at once"),
    ],
    ids=["noise", "one-more", "millions", "turns"],
)
def test_a_message_that_expands_too_much_is_not_parsed(server: Served, data: bytes, words: str) -> None:
    before = resident_bytes()
    with grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel:
        call: Callable[..., bytes] = channel.unary_unary(SCORE, lambda given: given, lambda given: given)
        with pytest.raises(grpc.RpcError) as caught:
            call(data, timeout=PATIENCE_S)
    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert words in str(caught.value.details())
    assert resident_bytes() - before < 100_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_request_without_samples_is_refused(server: Served) -> None:
    with open_channel(server.address, Credentials()) as channel:
        call: Any = channel.unary_unary(SCORE, pb.ScoreRequest.SerializeToString, pb.ScoreReply.FromString)
        reply = call(pb.ScoreRequest(), timeout=PATIENCE_S)
    assert Reason.INVALID == reply.refusal.reason
    assert not reply.HasField("model")


def test_a_closed_client_and_one_that_finds_no_server_are_unavailable(short_folder: Path) -> None:
    absent = RewardClient(f"unix:{short_folder}/none.sock", deadline_s=0.3)
    with pytest.raises(Unavailable, match="no answer within 0.3 s"):
        absent.score(samples())
    waiting = RewardClient(f"unix:{short_folder}/none.sock", deadline_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(waiting.score, samples())
        waiting.close()
        with pytest.raises(Unavailable):
            waits.result(PATIENCE_S)


async def test_a_full_queue_is_overloaded_and_an_error_reaches_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_service, "MAX_WAITING_ROWS", 4)
    gate = threading.Event()

    def score(rows: Sequence[Sequence[int]]) -> tuple[float | None, ...]:
        gate.wait(PATIENCE_S)
        if any(7 in row for row in rows):
            raise ValueError("seven")
        return tuple(float(row[0]) for row in rows)

    queue = Batcher(score, max_rows=2)
    first = asyncio.ensure_future(queue.ask([[1]]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first pass has begun
    waiting = [asyncio.ensure_future(queue.ask([[number], [number]])) for number in (2, 7)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as caught:
        await queue.ask([[3]])
    assert Reason.OVERLOADED == caught.value.refusal.reason
    assert caught.value.refusal.retry_after_ms > 0
    gate.set()
    assert (1.0,) == await first
    assert (2.0, 2.0) == await waiting[0]
    with pytest.raises(ValueError, match="seven"):
        await waiting[1]
    assert (3.0,) == await queue.ask([[3]])
    queue.close()


def test_every_call_of_the_service_names_its_callers() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert CALLS.keys() == {f"/{service.full_name}/{method.name}" for method in service.methods}


SAMPLES = [Sample(prompt="p", response=text) for text in ("worst", "none", "zero", "half")]
VALUES = {"worst": -1.0, "none": None, "zero": 0.0, "half": 0.5}


def by_name(_prompts: list[Prompt], responses: list[str]) -> list[float | None]:
    return [VALUES[response] for response in responses]


SAID: dict[str, Any] = {}


def as_said(_prompts: list[Prompt], _responses: list[str]) -> Any:
    return SAID["said"]


def path_of(function: Callable[..., Any]) -> str:
    return f"tests.unit.workloads.language.test_rewards:{function.__name__}"


def test_minus_one_and_zero_are_rewards_and_none_is_none_in_a_list_or_an_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewards = CallableRewards(path_of(by_name)).score(SAMPLES)
    assert (-1.0, None, 0.0, 0.5) == rewards.values
    assert path_of(by_name) == rewards.by.name
    assert 64 == len(rewards.by.sha256)
    assert (None, None) == (rewards.by.mean, rewards.by.std)
    monkeypatch.setitem(SAID, "said", np.full(4, -1, np.float32))
    assert (-1.0,) * 4 == CallableRewards(path_of(as_said)).score(SAMPLES).values
    monkeypatch.setitem(SAID, "said", [np.float32(0.5), np.int64(1), torch.tensor(0.25), np.bool_(True)])
    assert (0.5, 1.0, 0.25, 1.0) == CallableRewards(path_of(as_said)).score(SAMPLES).values
    monkeypatch.setitem(SAID, "said", [True, False, None, 2])
    assert (1.0, 0.0, None, 2.0) == CallableRewards(path_of(as_said)).score(SAMPLES).values


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1.0], "1 rewards for 4 samples"),
        ([float("nan")] * 4, "reward 0 is nan"),
        ([10**400] * 4, "reward 0 is 1000"),
        ([np.float32("inf")] * 4, "reward 0 is inf"),
        ([np.zeros(1)] * 4, "reward 0 is array"),
        (["good"] * 4, "reward 0 is 'good'"),
        (None, "returned NoneType: return a list"),
    ],
)
def test_an_invalid_reward_is_an_error_that_names_the_function(
    monkeypatch: pytest.MonkeyPatch, said: Any, message: str
) -> None:
    monkeypatch.setitem(SAID, "said", said)
    with pytest.raises(BadReward, match=message) as caught:
        CallableRewards(path_of(as_said)).score(SAMPLES)
    assert path_of(as_said) in str(caught.value)


Answer = tuple[int, bytes]


@contextmanager
def served(answers: Sequence[Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server that gives these answers in turn, the last one for ever.

    Its URL and what it was sent.
    """
    asked: list[dict[str, Any]] = []

    def answer(given: Any, _authorization: str | None) -> Answer:
        asked.append(given)
        return answers[min(len(asked), len(answers)) - 1]

    with reward_endpoint(answer) as url:
        yield url, asked


def reply(**fields: Any) -> Answer:
    return 200, json.dumps(fields).encode()


def test_an_endpoint_is_sent_text_and_answers_rewards_without_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
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
    assert caplog.records == []


def test_a_temporary_failure_is_retried() -> None:
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
        (reply(rewards=[1.0, "1", 1.0, 1.0]), BadReward, "reward 1 is .1."),
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
        ("./gone", "name a reward model's folder"),
        ("http://", "write http://HOST/PATH"),
        ("grpc://far", "write HOST:PORT"),
        ("grpc://far.example:1", "plaintext beyond loopback"),
        ("json:no_such_function", "cannot be loaded"),
    ],
)
def test_an_unknown_source_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_source(text)


TASK = Sentiment()


def feedback(folder: Path, *, scored: int, pairs: int) -> Source:
    rng = np.random.default_rng(0)
    rows = [*TASK.scored(rng, scored), *pairs_of(TASK, rng, pairs)]
    file = folder / "feedback.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(place=str(file), scale=parse_scale("percent"))


def order(base: Path, source: Source, out: Path, **settings: Any) -> Order:
    known = {"epochs": 2, "batch": 8, "rank": 4, "learning_rate": 1e-2, **settings}
    return Order(source=source, base=str(base), out=out, settings=RewardTraining(**known))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_the_losses_are_the_squared_error_and_that_of_bradley_and_terry() -> None:
    scores = torch.tensor([0.5, -1.0, 2.0, 0.1, 1.0, 0.3])
    found = loss_of(scores, torch.tensor([1.0, -1.0]), centring=0.01)
    pairs = [
        -float(functional.logsigmoid(torch.tensor(chosen - rejected))) + 0.01 * (chosen + rejected) ** 2
        for chosen, rejected in ((2.0, 1.0), (0.1, 0.3))
    ]
    assert found.tolist() == pytest.approx([0.25, 0.0, *pairs])
    assert loss_of(scores[:2], torch.tensor([1.0, -1.0]), 0.0).tolist() == [0.25, 0.0]


def test_a_mix_of_scores_and_pairs_is_learned_and_written_whole(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = train(order(base, feedback(tmp_path, scored=40, pairs=40), out))
    assert results == json.loads((out / "training_results.json").read_text())
    counted = results["feedback"]
    assert 40 == counted["train"]["scored"] + counted["validation"]["scored"]
    assert 40 == counted["train"]["pairs"] + counted["validation"]["pairs"]
    assert 14 <= counted["validation"]["scored"] + counted["validation"]["pairs"] <= 18
    found = results["validation"]
    told = ("mse", "mae", "slope", "pair_accuracy", "calibration_error")
    assert all(found[name] is not None for name in told)
    epochs = [row["eval_loss"] for row in results["history"] if "eval_loss" in row]
    assert results["validation_loss"] == min(epochs)
    assert not (out / "checkpoints").exists()
    loaded = RewardModel.load(out)
    assert results["sha256"] == loaded.by.sha256
    assert (results["reward_mean"], results["reward_std"]) == (loaded.by.mean, loaded.by.std)


def test_scores_to_check_are_those_of_full_precision(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fitting._arguments
    mixed = lambda *given, **named: replace(plain(*given, **named), bf16=True)  # noqa: E731
    monkeypatch.setattr(fitting, "_arguments", mixed)
    out = tmp_path / "out"
    train(order(base, feedback(tmp_path, scored=40, pairs=0), out, learning_rate=0.05))
    card = json.loads((out / "reward.json").read_text())
    found = RewardModel.load(out).score_rows([one["ids"] for one in card["checks"]])
    assert found == pytest.approx([one["score"] for one in card["checks"]], abs=1e-6)


def test_the_best_weights_are_kept_not_the_last(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=60, pairs=0)
    results = train(order(base, source, tmp_path / "out", epochs=4, learning_rate=0.3, schedule="constant"))
    epochs = [row["eval_loss"] for row in results["history"] if "eval_loss" in row][:4]
    assert results["best_step"] == results["steps"] // 4 * (1 + epochs.index(min(epochs)))
    assert results["validation"]["mse"] == pytest.approx(min(epochs), rel=1e-5)


def test_micro_batches_do_not_change_the_weights(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=11, pairs=6)
    for micro in (8, 2):
        done = train(order(base, source, tmp_path / str(micro), micro_batch=micro, validation_share=0.2))
        # Five examples are left for the last batch: two, two and one of them in a micro-batch.
        assert sum(done["feedback"]["train"][kind] for kind in ("scored", "pairs")) % 8 == 5
    whole, parts = weights(tmp_path / "8"), weights(tmp_path / "2")
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=1e-5)


class _StopAt(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
    def __init__(self, stop: threading.Event, step: int) -> None:
        self._stop, self._step = stop, step

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        if state.global_step + 1 == self._step:
            self._stop.set()


def test_an_interrupted_training_continues_as_if_nothing_had_been(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = feedback(tmp_path, scored=40, pairs=20)
    train(order(base, source, tmp_path / "whole"))
    stop = threading.Event()
    progress = fitting._Progress
    monkeypatch.setattr(fitting, "_Progress", lambda: _StopAt(stop, 3))
    parted = order(base, source, tmp_path / "parted")
    with pytest.raises(Interrupted):
        train(parted, stop)
    assert not (tmp_path / "parted" / "reward.json").exists()
    monkeypatch.setattr(fitting, "_Progress", progress)

    with pytest.raises(ConfigurationError, match="go on with --resume"):
        train(parted)
    resumed = replace(parted, resume=True)
    train(resumed)
    whole, rest = weights(tmp_path / "whole"), weights(parted.out)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    with pytest.raises(ConfigurationError, match="holds a trained reward model already"):
        train(resumed)


def test_a_different_training_is_not_continued(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=20, pairs=0)
    stop = threading.Event()
    stop.set()
    begun = order(base, source, tmp_path / "out")
    with pytest.raises(Interrupted):
        train(begun, stop)
    other = order(base, source, begun.out, rank=8)
    with pytest.raises(ConfigurationError, match="--resume: rank=8, and it was begun with 4"):
        train(replace(other, resume=True))
    more = feedback(tmp_path, scored=30, pairs=0)
    with pytest.raises(ConfigurationError, match="--resume: feedback="):
        train(replace(begun, source=more, resume=True))
    shutil.rmtree(begun.out)
    with pytest.raises(ConfigurationError, match="holds no checkpoint"):
        train(replace(begun, resume=True))


def test_a_reference_set_gives_the_mean_and_deviation_of_scores(base: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference.jsonl"
    responses = ["good great", "bad", "tree tree"]
    reference.write_text(
        "".join(json.dumps({"prompt": "tree", "response": one, "score": 50}) + "\n" for one in responses)
    )
    known = order(base, feedback(tmp_path, scored=20, pairs=0), tmp_path / "out")
    train(replace(known, reference=Source(place=str(reference), scale=parse_scale("percent"))))
    model = RewardModel.load(known.out)
    told = model.score([Sample(prompt="tree", response=one) for one in responses])
    scores = [float(value or 0) for value in told.values]
    assert (model.by.mean, model.by.std) == pytest.approx((np.mean(scores), np.std(scores)), abs=1e-6)


def test_rows_that_do_not_fit_are_counted_with_the_bad_ones(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=20, pairs=0)
    with Path(source.place).open("a") as file:
        file.write(json.dumps({"prompt": "tree", "response": "good " * 100, "score": 50}) + "\n")
    results = train(order(base, source, tmp_path / "out"))
    assert 1 == results["feedback"]["bad_rows"]
    assert "line 21: the response has 101 tokens, 64 fit" in results["feedback"]["bad_rows_shown"][0]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("rnak=4", "rnak=4: Extra inputs are not permitted"),
        ("micro_batch=5", "micro_batch=5: batch=32 is no multiple of it"),
    ],
)
def test_an_invalid_setting_is_named(said: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        training_settings((said,))


HEADS = parse_heads(["thumb=thumbs", "relevance=stars"])


def row(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "response": "b", "rater": "ann", **fields}


def told(*rows: Any) -> Any:
    return to_opinions(((f"line {number}", one) for number, one in enumerate(rows, 1)), HEADS)


def test_all_ratings_of_a_response_by_a_rater_are_one_example() -> None:
    found = told(
        row(key="thumb", score=True),
        row(key="relevance", score=5),
        row(key="relevance", score=2),
        row(key="thumb", score=False, rater="bob"),
        row(key="thumb", score=True, rater=""),
        row(key="relevance", score=3, rater=None),
    )
    shares = [one.shares for one in found.examples]
    assert shares == [{"thumb": 1.0, "relevance": 0.25}, {"thumb": 0.0}, {"thumb": 1.0}, {"relevance": 0.5}]


def test_pairs_and_other_keys_and_bad_rows_are_distinguished() -> None:
    found = told(
        {"prompt": "a", "chosen": "x", "rejected": "y"},
        row(key="charm", score=3),
        row(key="relevance", score=9),
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        ValueError("not JSON"),
        row(key="thumb", response=None, score=True),
        {"response": "b", "key": "thumb", "score": True},
    )
    assert [type(one) for one in found.examples] == [Preference]
    assert found.other_key == 1
    assert found.bad.shown == [
        "line 3: score=9 is outside 1 to 5 (scale stars)",
        "line 4: chosen and rejected are the same",
        "line 5: not JSON",
        "line 6: no response",
        "line 7: prompt is NoneType, neither text nor a list of messages",
    ]


def test_a_place_without_a_row_for_any_head_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text('{"prompt": "a", "response": "b", "key": "charm", "score": 1}\n')
    with pytest.raises(ConfigurationError, match="1 rows rate something else than thumb, relevance"):
        read_opinions(str(file), HEADS)


def test_the_sides_share_no_prompt() -> None:
    given = [Judged(prompt=f"prompt {number % 200}", response=str(number), where="") for number in range(600)]
    sides = split_opinions(given, share=0.25, seed=0)
    assert not {one.prompt for one in sides.train} & {one.prompt for one in sides.validation}
    assert 100 < len(sides.validation) < 200
    assert split_opinions(given, share=0.25, seed=0) == sides
    assert split_opinions(given, share=0.0, seed=0).validation == ()
