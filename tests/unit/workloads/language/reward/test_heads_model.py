"""A model of several heads: trained, saved, read again, asked, and taught more."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.chat.people import population
from penstock.workloads.language.feedback import Source, parse_scale
from penstock.workloads.language.reward.heads import parse_heads
from penstock.workloads.language.reward.reward_model import HEADS_CARD, HeadsModel, open_source
from penstock.workloads.language.reward.reward_source import BadSample, Sample
from penstock.workloads.language.reward.training import Order, train
from penstock.workloads.language.settings import RewardTraining
from tests.support.chat.opinions import feedback
from tests.support.language.chat_base import make_chat_base

HEADS = parse_heads(["thumb=thumbs", "relevance=stars"])
SAMPLES = [Sample(prompt="how soil rose", response="gladly seed"), Sample(prompt="why map", response="maybe")]


def rows(seed: int, count: int = 60) -> list[dict[str, Any]]:
    """What people say of so many responses, and a few pairs."""
    return list(
        feedback(population(9, seed=0), np.random.default_rng(seed), rated=count, compared=count // 3)
    )


def source_of(file: Path) -> Source:
    """Feedback whose scales are those of the heads."""
    return Source(place=str(file), scale=parse_scale("none"))


def order(folder: Path, **said: Any) -> Order:
    """A short training, on feedback in which one row is bad."""
    file = folder / "said.jsonl"
    text = "".join(json.dumps(one) + "\n" for one in [*rows(0), {"prompt": "tree", "key": "thumb"}])
    file.write_text(text)
    settings = RewardTraining(epochs=2, batch=16, learning_rate=3e-3, rank=4)
    known = {"source": source_of(file), "heads": HEADS, "base": str(folder / "base"), "out": folder / "model"}
    return Order(**{**known, "settings": settings, **said})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and a trained model."""
    folder = tmp_path_factory.mktemp("heads")
    make_chat_base(folder / "base", steps=2, texts=64)
    results = train(order(folder))
    assert [one.partition(": ")[2] for one in results["bad_rows_shown"]] == ["no score"]
    assert set(results["measures"]["heads"]) == {"thumb", "relevance"}
    assert results["train"]["responses"] > results["validation"]["responses"] > 0
    return folder


def test_what_is_read_again_says_the_same(place: Path) -> None:
    model = HeadsModel.load(place / "model")
    said = model.judge(SAMPLES)
    assert all(0 < share < 1 for one in said for share in one.shares.values())
    assert set(said[0].shares) == {"thumb", "relevance", "preferred"}
    assert said[0].reward == pytest.approx((said[0].shares["thumb"] + said[0].shares["relevance"]) / 2)
    found = open_source(str(place / "model")).score(SAMPLES)
    assert found.values == pytest.approx([2 * one.reward - 1 for one in said])
    assert found.by.sha256 == model.by.sha256
    model.save(place / "again")
    again = HeadsModel.load(place / "again", base=str(place / "base"))
    assert [one.reward for one in again.judge(SAMPLES)] == pytest.approx([one.reward for one in said])


def test_what_somebody_said_counts_instead_of_the_guess(place: Path) -> None:
    model = HeadsModel.load(place / "model")
    [said] = model.judge(SAMPLES[:1])
    prompt, response = SAMPLES[0].prompt, SAMPLES[0].response
    assert model.score_response(prompt, response) == pytest.approx(said.reward)
    known = model.score_response(prompt, response, {"relevance": 5})
    assert known == pytest.approx((said.shares["thumb"] + 1) / 2)
    assert model.score_response(prompt, response, {"relevance": 1, "thumb": False}) == 0
    with pytest.raises(ValueError, match="there is no such head; this model has thumb, relevance"):
        model.score_response(prompt, response, {"charm": 3})
    with pytest.raises(ValueError, match="score=7 is outside 1 to 5"):
        model.score_response(prompt, response, {"relevance": 7})


def test_more_feedback_teaches_it_more(place: Path) -> None:
    model = HeadsModel.load(place / "model")
    before = model.judge(SAMPLES)[0].shares["thumb"]
    same = {"prompt": "how soil rose", "response": "gladly seed", "key": "thumb", "score": False}
    new = [{**same, "rater": str(number)} for number in range(64)]
    settings = RewardTraining(epochs=6, batch=16, learning_rate=1e-2, validation_share=0)
    measures = model.update_from_feedback([*new, *rows(0, 10)], settings=settings)
    assert measures.heads["thumb"].ratings == 0, "nothing was held out"
    assert model.judge(SAMPLES)[0].shares["thumb"] < before - 0.1
    model.save(place / "taught")
    taught = HeadsModel.load(place / "taught")
    assert taught.judge(SAMPLES)[0].shares["thumb"] == pytest.approx(
        model.judge(SAMPLES)[0].shares["thumb"], abs=1e-4
    )
    with pytest.raises(ValueError, match="no row can be used: row 1: no score"):
        model.update_from_feedback([{**same, "score": None}])


def test_weights_say_what_counts(place: Path) -> None:
    train(order(place, out=place / "weighed", weights={"thumb": 0.0, "preferred": 1.0}))
    [said] = HeadsModel.load(place / "weighed").judge(SAMPLES[:1])
    assert said.reward == pytest.approx((said.shares["relevance"] + said.shares["preferred"]) / 2)
    for weights, text in (
        ({"charm": 1.0}, "weight charm=1: there is no such head"),
        ({"thumb": -1.0}, "weight thumb=-1: must be 0 or more"),
        ({"thumb": 0.0, "relevance": 0.0}, "all weights are 0"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            train(order(place, out=place / "never", weights=weights))


def test_what_nobody_has_rated_counts_nothing(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "thumbs.jsonl"
    thumbs = [one for one in rows(0) if one.get("key") == "thumb" and "score" in one]
    file.write_text("".join(json.dumps(one) + "\n" for one in thumbs))
    said: dict[str, Any] = {"source": source_of(file), "base": str(place / "base"), "out": tmp_path / "model"}
    with pytest.raises(ConfigurationError, match=r"weight preferred=1: no row .* rates it, .*: thumb"):
        train(order(tmp_path, **said, weights={"preferred": 1.0, "thumb": 0.0, "relevance": 0.0}))
    train(order(tmp_path, **said, weights={"preferred": 1.0}))
    assert HeadsModel.load(tmp_path / "model").card.weights == {
        "thumb": 1.0,
        "relevance": 0.0,
        "preferred": 0.0,
    }


def test_what_cannot_be_used_is_refused_by_name(place: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds a trained reward model already"):
        train(order(place))
    with pytest.raises(ConfigurationError, match=f"holds no {HEADS_CARD}"):
        HeadsModel.load(place / "base")
    make_chat_base(place / "other", steps=3, texts=8)
    with pytest.raises(ConfigurationError, match="where it gave .* when it was trained"):
        HeadsModel.load(place / "model", base=str(place / "other"))
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(order(place, out=place / "stopped"), stop)
    assert not (place / "stopped" / HEADS_CARD).exists()
    with pytest.raises(BadSample, match="use this model's tokenizer"):
        HeadsModel.load(place / "model").judge([Sample(prompt_ids=(1,), response_ids=(9999,))])
