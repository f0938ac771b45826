import json
import math
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.chat.people import population
from penstock.workloads.language.feedback import BadRows, Preference, Scored, Source, parse_scale
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward.heads import (
    LEAST,
    Calibration,
    Measures,
    area_under_curve,
    calibrate,
    doubt,
    expected_calibration_error,
    measure,
    measure_head,
    measure_heads,
    parse_heads,
)
from penstock.workloads.language.reward.reward_model import (
    HEADS_CARD,
    HeadsModel,
    Item,
    Network,
    RewardModel,
    encode,
    open_source,
)
from penstock.workloads.language.reward.reward_source import (
    BadSample,
    Sample,
    sample_from_proto,
    sample_to_proto,
)
from penstock.workloads.language.reward.training import (
    RATING_WEIGHT,
    Order,
    heads_loss,
    train,
    without_difference,
)
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.plugin.logistic import fit_logistic
from tests.support.chat.opinions import feedback
from tests.support.language.tiny_models import disturbed, make_chat_base, make_reward_model, samples
from tests.support.oracles.logistic_minimum import check_minimum


def test_a_rating_becomes_a_share_of_its_scale() -> None:
    stars, thumb, charm = parse_heads(["relevance=stars", "thumb=thumbs", "charm=0:10"])
    assert [stars.share(one) for one in (1, 3, 5)] == [0.0, 0.5, 1.0]
    assert (thumb.share(True), thumb.share("down"), charm.share(2.5)) == (1.0, 0.0, 0.25)
    assert (thumb.is_choice, stars.is_choice) == (True, False)
    with pytest.raises(ValueError, match="score=6 is outside 1 to 5"):
        stars.share(6)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["relevance"], "head 'relevance': write NAME=SCALE"),
        (["preferred=thumbs"], "'preferred' is the head of pairs"),
        (["charm=none"], "head 'charm=none': a head gives 0 to 1, so its scale has bounds"),
        (["charm=3:1"], "head 'charm=3:1': scale='3:1'"),
        (["a=stars", "a=thumbs"], "head 'a': is declared twice"),
        ([], "0 heads: declare 1 to 32"),
    ],
)
def test_invalid_heads_are_refused_by_name(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_heads(texts)


NAN = float("nan")
HEADS = parse_heads(["thumb=thumbs", "relevance=stars"])
NO_PAIRS = torch.zeros(0, 2)


def test_a_loss_is_the_sum_over_heads_of_means_over_what_was_said() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 5.0], [1.0, 1.0]], requires_grad=True)
    targets = torch.tensor([[1.0, 1.0], [0.0, NAN], [NAN, NAN]])
    choice = (math.log(2) + math.log(4)) / 2
    loss = heads_loss(logits, targets, HEADS, NO_PAIRS, 0.0)
    assert loss.item() == pytest.approx(choice + RATING_WEIGHT * 0.25)
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, ~targets.isnan())
    assert logits.grad.isfinite().all()


def test_a_pair_separates_its_scores_around_zero() -> None:
    pairs = torch.tensor([[1.0, 3.0]], requires_grad=True)
    empty = torch.zeros(0, 2)
    loss = heads_loss(empty, empty, HEADS, pairs, 0.0)
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(2.0)))
    loss.backward()
    assert pairs.grad is not None
    assert pairs.grad[0, 0] < 0 < pairs.grad[0, 1]
    assert float(heads_loss(empty, empty, HEADS, pairs.detach(), 0.5)) == pytest.approx(
        float(loss.detach()) + 8.0
    )


@pytest.mark.parametrize("head", [0, 1])
def test_the_loss_is_least_at_the_mean_of_the_ratings(head: int) -> None:
    targets = torch.full((4, 2), NAN)
    targets[:, head] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    shares = torch.linspace(0.05, 0.95, 19)
    losses = [
        float(heads_loss(torch.full((4, 2), float(one.logit())), targets, HEADS, NO_PAIRS, 0.0))
        for one in shares
    ]
    assert float(shares[losses.index(min(losses))]) == pytest.approx(0.75)


def test_measures_use_only_given_ratings() -> None:
    shares = np.array([[0.9, 0.5], [0.4, 0.5], [0.4, 0.5]])
    targets = np.array([[1.0, NAN], [1.0, NAN], [0.0, 0.25]])
    found = measure_heads(["thumb", "charm"], shares, targets, np.array([2.0, -1.0, 0.0]))
    assert found.heads["thumb"].ratings == 3
    assert found.heads["thumb"].squared_error == pytest.approx((0.01 + 0.36 + 0.16) / 3)
    assert found.heads["thumb"].auc == pytest.approx(0.75)
    assert found.heads["charm"].squared_error == pytest.approx(0.0625)
    assert found.heads["charm"].auc is None
    assert (found.pairs, found.pair_accuracy) == (3, 0.5)
    assert asdict(found)["heads"]["charm"]["ratings"] == 1


def test_an_area_agrees_with_counting_every_pair() -> None:
    rng = np.random.default_rng(0)
    above, below = rng.integers(5, size=40).astype(float), rng.integers(4, size=60).astype(float)
    counted = np.mean([(a > b) + (a == b) / 2 for a in above for b in below])
    assert area_under_curve(above, below) == pytest.approx(float(counted))
    assert area_under_curve(above, below[:0]) is None


SAMPLES = [Sample(prompt="how soil rose", response="gladly seed"), Sample(prompt="why map", response="maybe")]


def rows(seed: int, count: int = 60) -> list[dict[str, Any]]:
    return list(
        feedback(population(9, seed=0), np.random.default_rng(seed), rated=count, compared=count // 3)
    )


def source_of(file: Path) -> Source:
    return Source(place=str(file), scale=parse_scale("none"))


def order(folder: Path, **said: Any) -> Order:
    file = folder / "said.jsonl"
    text = "".join(json.dumps(one) + "\n" for one in [*rows(0), {"prompt": "tree", "key": "thumb"}])
    file.write_text(text)
    settings = RewardTraining(epochs=2, batch=16, learning_rate=3e-3, rank=4)
    known = {"source": source_of(file), "heads": HEADS, "base": str(folder / "base"), "out": folder / "model"}
    return Order(**{**known, "settings": settings, **said})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    make_chat_base(folder / "base", steps=2, texts=64)
    results = train(order(folder))
    assert [one.partition(": ")[2] for one in results["bad_rows_shown"]] == ["no score"]
    assert set(results["measures"]["heads"]) == {"thumb", "relevance"}
    assert results["train"]["responses"] > results["validation"]["responses"] > 0
    return folder


def test_a_model_of_heads_that_is_read_again_says_the_same(place: Path) -> None:
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


def test_a_given_rating_replaces_the_prediction(place: Path) -> None:
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


def test_more_feedback_teaches_a_model_of_heads_more(place: Path) -> None:
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


def test_weights_of_heads_say_what_counts(place: Path) -> None:
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


def test_heads_without_ratings_count_nothing(place: Path, tmp_path: Path) -> None:
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


def test_unusable_input_is_refused_by_name(place: Path) -> None:
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


def scored(score: float, prompt: str = "p") -> Scored:
    return Scored(prompt=prompt, response="r", score=score, where="")


PAIR = Preference(prompt="p", chosen="a", rejected="b", where="")


def test_scores_have_errors_and_a_line_and_nothing_has_none() -> None:
    found = measure([scored(1.0), scored(-1.0, "q")], [(0.5,), (0.0,)])
    assert (0.625, 0.75) == (found.mse, found.mae)
    assert (4.0, -1.0) == pytest.approx((found.slope, found.intercept))
    assert (2, 0, None, None) == (found.scored, found.pairs, found.pair_accuracy, found.calibration_error)
    assert Measures() == measure([], [])
    assert measure([scored(1.0), scored(0.0)], [(2.0,), (2.0,)]).slope is None


def test_pairs_that_are_given_and_pairs_of_one_prompt_are_measured() -> None:
    assert 0.5 == measure([PAIR] * 3, [(1.0, 0.0), (0.0, 1.0), (2.0, 2.0)]).pair_accuracy
    found = measure([scored(1.0), scored(1.0), scored(0.0)], [(3.0,), (1.0,), (2.0,)])
    assert (2, 0.5) == (found.pairs, found.pair_accuracy)


@pytest.mark.parametrize(
    ("pairs", "accuracy", "width"),
    [
        (100, 0.6, "± 0.1"),
        (100, 0.3, "± 0.1"),
        (400, 0.54, "± 0.05"),
        (100, 0.61, ""),
        (400, 0.56, ""),
        (5, 1.0, ""),
        (0, None, ""),
    ],
)
def test_a_model_no_better_than_chance_is_doubted(pairs: int, accuracy: float | None, width: str) -> None:
    said = doubt(asdict(Measures(pairs=pairs, pair_accuracy=accuracy)))
    assert bool(said) is bool(width)
    assert (f"pair_accuracy {accuracy} of {pairs} pairs" in said) is bool(width)
    assert width in said
    assert not doubt(None)


def test_pairs_that_the_tokenizer_does_not_tell_apart_are_bad_rows() -> None:
    encoder, bad = Encoder(tiny_models.build_tokenizer(["good", "great"]), 32), BadRows()
    pairs = [("good great", "good  great"), ("qzqzq", "zqzqz"), ("good", "great")]
    examples = [
        Preference(prompt="good", chosen=chosen, rejected=rejected, where=f"row {number}")
        for number, (chosen, rejected) in enumerate(pairs, 1)
    ]
    assert [one.example.where for one in encode(examples, encoder, bad)] == ["row 3"]
    assert bad.shown[0] == (
        "row 1: chosen and rejected are the same tokens: nothing can be learned from them"
    )
    assert bad.count == 2


def test_ratings_without_a_difference_are_told() -> None:
    def item(target: float | tuple[float, ...] | None) -> Item:
        return Item(Scored(prompt="p", response="r", score=0.0, where=""), ([1],), target)

    heads = parse_heads(["thumb=thumbs", "depth=stars"])
    assert without_difference([item(0.5), item(0.5), item(None)], ()) == [
        "all ratings of the score are equal: a model learns no difference from them"
    ]
    assert without_difference([item(0.5), item(0.25)], ()) == without_difference([item(None)] * 2, ()) == []
    rated = [item((1.0, math.nan)), item((1.0, 0.2)), item((math.nan, 0.4))]
    assert [line[:26] for line in without_difference(rated, heads)] == ["all ratings of head 'thumb'"[:26]]


def test_a_calibrated_model_has_no_calibration_error() -> None:
    margin = np.log(3)
    assert expected_calibration_error(np.array([margin] * 3 + [-margin])) == pytest.approx(0, abs=1e-12)
    assert expected_calibration_error(np.array([50.0] * 3 + [-50.0])) == pytest.approx(0.25)


def test_a_calibration_finds_the_line_that_made_the_answers() -> None:
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal(20_000)
    said = (rng.random(20_000) < 1 / (1 + np.exp(-(0.5 * logits - 1)))).astype(np.float64)
    said[rng.random(20_000) < 0.3] = np.nan
    found = calibrate(logits, said)
    assert (found.slope, found.shift) == pytest.approx((0.5, -1.0), abs=0.06)
    assert (measure_head(found.share(logits), said).calibration_error or 1) < 0.02
    assert (measure_head(Calibration().share(logits), said).calibration_error or 0) > 0.1


def test_a_calibration_meets_shares_between_no_and_yes_in_the_middle() -> None:
    found = calibrate(np.random.default_rng(1).standard_normal(500), np.full(500, 0.7))
    assert found.share(np.array([-1.0, 0.0, 1.0])) == pytest.approx(0.7, abs=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["drawn", "separate", "noise", "constant"])
@pytest.mark.parametrize("shift", [0.0, 5.0, -50.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
def test_a_calibration_is_the_minimum_whatever_the_outputs_are(scale: float, shift: float, kind: str) -> None:
    for seed, count in product(range(2), (30, 100)):
        rng = np.random.default_rng(seed)
        drawn = rng.standard_normal(count)
        logits = np.full(count, shift) if kind == "constant" else shift + scale * drawn
        chance = {"drawn": 1 / (1 + np.exp(-drawn)), "separate": drawn > 0}.get(kind, np.full(count, 0.9))
        said = rng.random(count) if kind == "noise" else (rng.random(count) < chance).astype(np.float64)
        inputs, towards = np.stack([logits, np.ones(count)], 1), np.array([1.0, 0.0])
        found = fit_logistic(inputs, said, np.full(2, 1e-3), towards)
        check_minimum(inputs, said, np.full(2, 1e-3), towards, found)
        assert calibrate(logits, said) == (tuple(found) if found[0] > 0 else Calibration())
        assert np.isfinite(Calibration(*found).share(np.array([-1e300, -1e4, 0.0, 1e4, 1e300]))).all()


@pytest.mark.parametrize("how", ["few", "turned", "certain"])
def test_a_calibration_leaves_alone_what_it_cannot_judge(how: str) -> None:
    logits = np.linspace(-2, 2, 200)
    said = (logits > 0).astype(np.float64)
    if how == "few":
        assert calibrate(logits[: LEAST - 1], said[: LEAST - 1]) == Calibration()
    elif how == "turned":
        assert calibrate(logits, 1 - said) == Calibration()
    else:
        found = calibrate(logits, said)
        assert found.slope > 1
        assert np.isfinite([found.slope, found.shift]).all()


TEXTS = samples()


@pytest.mark.parametrize("lora", [True, False])
def test_scores_survive_save_and_load(base: Path, tmp_path: Path, lora: bool) -> None:
    scores = make_reward_model(base, folder := tmp_path / "reward", lora=lora)
    loaded = RewardModel.load(folder)
    rewards = loaded.score(TEXTS)
    assert np.ptp(scores) > 0.1
    assert rewards.values == pytest.approx(scores, abs=1e-6)
    assert (0.25, 2.0, "reward") == (rewards.by.mean, rewards.by.std, rewards.by.name)
    # None of these can run code.
    names = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert names <= {".json", ".safetensors", ".md", ".jinja", ".txt"}


def test_transformers_and_peft_alone_give_the_same_scores(base: Path, tmp_path: Path) -> None:
    scores = make_reward_model(base, folder := tmp_path / "reward")
    network, tokenizer = plainly(base, folder)
    for sample, score in zip(TEXTS, scores, strict=True):
        inputs = tokenizer(f"{sample.prompt} {sample.response} <eos>", return_tensors="pt")
        with torch.no_grad():
            (logit,) = network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[
                0
            ]
        assert float(logit) == pytest.approx(score, abs=1e-5)
    assert {"mean": 0.25, "std": 2.0, "max_tokens": 64} == network.config.reward


def plainly(base: Path, folder: Path) -> tuple[Network, Any]:
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(base, config=config, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_the_side_of_the_padding_does_not_change_a_score(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    network, tokenizer = plainly(base, folder)
    network.double()
    loaded = RewardModel.load(folder)
    loaded.network.double()
    expected = exactly(loaded)
    texts = [f"{one.prompt} {one.response} <eos>" for one in TEXTS]
    for side in ("right", "left"):
        inputs = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = network(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=positions
            ).logits
        assert logits[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    loaded.encoder.tokenizer.padding_side = "left"
    assert exactly(loaded) == expected


def exactly(model: RewardModel, chosen: Sequence[Sample] = TEXTS) -> list[float]:
    scores: list[float] = []
    model.network.register_forward_hook(lambda _module, _given, out: scores.extend(out.logits[:, 0].tolist()))
    rows = [model.encode(sample) for sample in chosen]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    reward_model.score_rows(model.network, rows)
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def test_order_and_company_of_a_row_do_not_change_its_score(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    loaded = RewardModel.load(folder)
    scores = loaded.score(TEXTS).values
    assert loaded.score(TEXTS[::-1]).values[::-1] == pytest.approx(scores, abs=1e-5)
    assert [loaded.score([one]).values[0] for one in TEXTS] == pytest.approx(scores, abs=1e-5)


def test_batches_stay_below_their_size_and_hold_every_row_once(base: Path) -> None:
    network, encoder = disturbed(base, lora=True)
    rows = [encoder.encode(one.prompt, one.response) for one in TEXTS]
    widths: list[int] = []
    network.get_input_embeddings().register_forward_hook(
        lambda _module, arguments, _out: widths.append(arguments[0].numel())
    )
    few = reward_model.score_rows(network, rows, batch_tokens=40)
    assert len(widths) > 5
    assert max(widths) <= 40
    assert few == pytest.approx(reward_model.score_rows(network, rows), abs=1e-5)


def test_token_ids_are_read_as_they_were_sampled(base: Path, tmp_path: Path) -> None:
    scores = make_reward_model(base, folder := tmp_path / "reward")
    loaded = RewardModel.load(folder)
    sample = TEXTS[0]
    prompt_ids = tuple(loaded.encoder.prompt_ids(sample.prompt))
    response_ids = tuple(loaded.encoder.response_ids(sample.response))
    by_ids = Sample(prompt="x", response="y", prompt_ids=prompt_ids, response_ids=response_ids)
    assert loaded.score([by_ids]).values[0] == pytest.approx(scores[0], abs=1e-6)
    cut_off = Sample(prompt_ids=prompt_ids, response_ids=response_ids[:-1])
    assert loaded.score([cut_off]).values[0] != pytest.approx(scores[0], abs=1e-4)


def test_a_response_cut_by_its_length_is_read_without_an_end_token(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    encoder = RewardModel.load(folder).encode
    eos = load_tokenizer(str(base)).eos_token_id
    ended, cut = (
        sample_from_proto(sample_to_proto(Sample(prompt="apple", response="good bad", cut_short=cut)))
        for cut in (False, True)
    )
    assert encoder(ended)[-1] == eos
    assert encoder(cut) == encoder(ended)[:-1]
    row = encoder(cut)
    assert encoder(Sample(prompt_ids=tuple(row[:-2]), response_ids=tuple(row[-2:]), cut_short=True)) == row


def test_a_different_base_model_is_detected(base: Path, tmp_path: Path) -> None:
    scores = make_reward_model(base, folder := tmp_path / "reward")
    tokenizer = load_tokenizer(str(base))
    tiny_models.save(tiny_models.build_model(tokenizer, seed=5), tokenizer, tmp_path / "other")
    with pytest.raises(ConfigurationError, match="is its base model .* another one now"):
        RewardModel.load(folder, base=str(tmp_path / "other"))
    shutil.copytree(base, tmp_path / "moved")
    moved = RewardModel.load(folder, base=str(tmp_path / "moved"))
    assert moved.score(TEXTS).values == pytest.approx(scores, abs=1e-6)


def test_a_folder_without_a_model_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name a folder that `penstock rlhf reward train` wrote"):
        RewardModel.load(tmp_path)
    make_reward_model(base, folder := tmp_path / "reward")
    adapter = json.loads((folder / "adapter_config.json").read_text())
    adapter["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ConfigurationError, match="say where it is with --base"):
        RewardModel.load(folder)


def test_the_sha256_identifies_the_scoring_model(base: Path, tmp_path: Path) -> None:
    make_reward_model(base, folder := tmp_path / "reward")
    shutil.copytree(folder, tmp_path / "copy")
    make_reward_model(base, other := tmp_path / "other", lora=False)
    first, copy, full = (reward_model.weights_sha256(one) for one in (folder, tmp_path / "copy", other))
    assert first == copy
    assert first != full
