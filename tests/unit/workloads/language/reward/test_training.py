"""Training: its losses, and that neither micro-batches nor an interruption change what comes out."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import TrainerCallback

from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from penstock.workloads.language.feedback import Source, parse_scale
from penstock.workloads.language.reward import training as fitting
from penstock.workloads.language.reward.reward_model import RewardModel
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.reward.training import Order, loss_of, train
from penstock.workloads.language.settings import RewardTraining, training_settings
from penstock.workloads.rlhf.sentiment import Sentiment
from tests.support.language.known_sentiment import pairs as pairs_of

TASK = Sentiment()
NEVER = threading.Event()


def feedback(folder: Path, *, scored: int, pairs: int) -> Source:
    """So many rows of each kind."""
    rng = np.random.default_rng(0)
    rows = [*TASK.scored(rng, scored), *pairs_of(TASK, rng, pairs)]
    file = folder / "feedback.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(place=str(file), scale=parse_scale("percent"))


def order(base: Path, source: Source, out: Path, **settings: Any) -> Order:
    """A short training."""
    known = {"epochs": 2, "batch": 8, "rank": 4, "learning_rate": 1e-2, **settings}
    return Order(source=source, base=str(base), out=out, settings=RewardTraining(**known))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of an adapter."""
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
    results = train(order(base, feedback(tmp_path, scored=40, pairs=40), out), NEVER)
    assert results == json.loads((out / "training_results.json").read_text())
    counted = results["feedback"]
    assert 40 == counted["train"]["scored"] + counted["validation"]["scored"]
    assert 40 == counted["train"]["pairs"] + counted["validation"]["pairs"]
    assert 14 <= counted["validation"]["scored"] + counted["validation"]["pairs"] <= 18
    found = results["validation"]
    assert all(
        found[name] is not None for name in ("mse", "mae", "slope", "pair_accuracy", "calibration_error")
    )
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
    monkeypatch.setattr(
        fitting, "_arguments", lambda *given, **named: replace(plain(*given, **named), bf16=True)
    )
    out = tmp_path / "out"
    train(order(base, feedback(tmp_path, scored=40, pairs=0), out, learning_rate=0.05), NEVER)
    card = json.loads((out / "reward.json").read_text())
    found = RewardModel.load(out).score_rows([one["ids"] for one in card["checks"]])
    assert found == pytest.approx([one["score"] for one in card["checks"]], abs=1e-6)


def test_the_best_weights_are_kept_not_the_last(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=60, pairs=0)
    results = train(
        order(base, source, tmp_path / "out", epochs=4, learning_rate=0.3, schedule="constant"), NEVER
    )
    epochs = [row["eval_loss"] for row in results["history"] if "eval_loss" in row][:4]
    assert results["best_step"] == results["steps"] // 4 * (1 + epochs.index(min(epochs)))
    assert results["validation"]["mse"] == pytest.approx(min(epochs), rel=1e-5)


def test_micro_batches_do_not_change_the_weights(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=11, pairs=6)
    for micro in (8, 2):
        done = train(
            order(base, source, tmp_path / str(micro), epochs=2, micro_batch=micro, validation_share=0.2),
            NEVER,
        )
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


def test_an_interrupted_training_goes_on_as_if_nothing_had_been(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = feedback(tmp_path, scored=40, pairs=20)
    train(order(base, source, tmp_path / "whole"), NEVER)
    stop = threading.Event()
    progress = fitting._Progress
    monkeypatch.setattr(fitting, "_Progress", lambda: _StopAt(stop, 3))
    parted = order(base, source, tmp_path / "parted")
    with pytest.raises(Interrupted):
        train(parted, stop)
    assert not (tmp_path / "parted" / "reward.json").exists()
    monkeypatch.setattr(fitting, "_Progress", progress)

    with pytest.raises(ConfigurationError, match="go on with --resume"):
        train(parted, NEVER)
    resumed = Order(source=source, base=str(base), out=parted.out, settings=parted.settings, resume=True)
    train(resumed, NEVER)
    whole, rest = weights(tmp_path / "whole"), weights(parted.out)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    with pytest.raises(ConfigurationError, match="holds a trained reward model already"):
        train(resumed, NEVER)


def test_another_training_is_not_taken_for_the_interrupted_one(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=20, pairs=0)
    stop = threading.Event()
    stop.set()
    begun = order(base, source, tmp_path / "out")
    with pytest.raises(Interrupted):
        train(begun, stop)
    other = order(base, source, tmp_path / "out", rank=8).settings
    with pytest.raises(ConfigurationError, match="--resume: rank=8, and it was begun with 4"):
        train(Order(source=source, base=str(base), out=begun.out, settings=other, resume=True), NEVER)
    more = feedback(tmp_path, scored=30, pairs=0)
    with pytest.raises(ConfigurationError, match="--resume: feedback="):
        train(Order(source=more, base=str(base), out=begun.out, settings=begun.settings, resume=True), NEVER)
    shutil.rmtree(begun.out)
    with pytest.raises(ConfigurationError, match="holds no checkpoint"):
        train(
            Order(source=source, base=str(base), out=begun.out, settings=begun.settings, resume=True), NEVER
        )


def test_a_reference_set_says_what_scores_are_usual(base: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference.jsonl"
    responses = ["good great", "bad", "tree tree"]
    reference.write_text(
        "".join(json.dumps({"prompt": "tree", "response": one, "score": 50}) + "\n" for one in responses)
    )
    known = order(base, feedback(tmp_path, scored=20, pairs=0), tmp_path / "out")
    train(
        Order(
            source=known.source,
            base=known.base,
            out=known.out,
            settings=known.settings,
            reference=Source(place=str(reference), scale=parse_scale("percent")),
        ),
        NEVER,
    )
    model = RewardModel.load(known.out)
    scores = [
        float(value or 0)
        for value in model.score([Sample(prompt="tree", response=one) for one in responses]).values
    ]
    assert (model.by.mean, model.by.std) == pytest.approx((np.mean(scores), np.std(scores)), abs=1e-6)


def test_rows_that_do_not_fit_are_counted_with_the_bad_ones(base: Path, tmp_path: Path) -> None:
    source = feedback(tmp_path, scored=20, pairs=0)
    with Path(source.place).open("a") as file:
        file.write(json.dumps({"prompt": "tree", "response": "good " * 100, "score": 50}) + "\n")
    results = train(order(base, source, tmp_path / "out"), NEVER)
    assert 1 == results["feedback"]["bad_rows"]
    assert "line 21: the response has 101 tokens, 64 fit" in results["feedback"]["bad_rows_shown"][0]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("rank=0", "rank=0: Input should be greater than 0"),
        ("rnak=4", "rnak=4: Extra inputs are not permitted"),
        ("micro_batch=5", "micro_batch=5: batch=32 is no multiple of it"),
        ("warmup=2", "warmup=2"),
    ],
)
def test_a_setting_that_cannot_be_is_named(said: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        training_settings((said,))
