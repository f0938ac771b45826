"""A network of several heads learns what people say as well as anything could, from noise and gaps."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from penstock.workloads.chat.people import THUMB, USUAL, draw_prompt, draw_response, population, read_profile
from penstock.workloads.language.feedback import Source, parse_scale
from penstock.workloads.language.reward.heads import PREFERRED, Head, parse_heads
from penstock.workloads.language.reward.reward_model import HeadsModel
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.language.reward.training import Order, train
from penstock.workloads.language.settings import RewardTraining
from tests.support.chat import opinions
from tests.support.chat.opinions import CRITERIA
from tests.support.chat.satisfaction import expected_auc, expected_pair_accuracy, expected_rating
from tests.support.language.tiny_models import make_chat_base

HEADS: Final = parse_heads(["thumb=thumbs", "relevance=stars", "helpfulness=stars", "safety=stars"])
FRESH: Final = 600
WITHIN: Final = 0.03
"""How far the squared error of a criterion may lie above its ceiling."""
ENOUGH: Final = 0.95
"""Share of the area under the curve that the oracle has."""


def feedback(file: Path, seed: int, rated: int, compared: int) -> Path:
    """What 60 people say, 3 of them liars."""
    rows = opinions.feedback(
        population(60, seed=seed), np.random.default_rng(seed), rated=rated, compared=compared
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def learned(folder: Path, file: Path, seed: int, epochs: int, heads: tuple[Head, ...] = HEADS) -> HeadsModel:
    """All weights of a small base that has read what people ask and are answered."""
    settings = RewardTraining(epochs=epochs, batch=64, learning_rate=2e-3, lora=False, seed=seed)
    base = folder.parent / "base"
    if not base.exists():
        make_chat_base(base, steps=300, texts=4000)
    source = Source(place=str(file), scale=parse_scale("none"))
    train(Order(source=source, heads=heads, base=str(base), out=folder, settings=settings, device="cpu"))
    return HeadsModel.load(folder)


def judged(model: HeadsModel, seed: int) -> dict[str, Any]:
    """Of responses that it has not seen, beside what is the most that there is."""
    rng = np.random.default_rng(1000 + seed)
    prompts = [draw_prompt(rng) for _ in range(FRESH)]
    samples = [Sample(prompt=prompt, response=draw_response(rng, prompt)) for prompt in prompts]
    features = np.array([read_profile(str(one.prompt), one.response) for one in samples], np.float64)
    said = model.judge(samples)
    shares = {name: np.array([one.shares[name] for one in said]) for name in said[0].shares}
    thumbs = USUAL.thumb_chance(features)
    found: dict[str, Any] = {}
    if THUMB in shares:
        found["auc"] = expected_auc(shares[THUMB], thumbs), expected_auc(thumbs, thumbs)
        found["calibration"] = float(np.abs(shares[THUMB] - thumbs).mean())
        found["pairs"] = expected_pair_accuracy(USUAL, shares[PREFERRED], features)
    for criterion in CRITERIA:
        if criterion.name in shares:
            mean, least = expected_rating(USUAL, criterion, features)
            found[criterion.name] = float(np.mean((shares[criterion.name] - mean) ** 2)), float(least.mean())
    return found


def test_several_heads_come_close_to_their_ceilings(tmp_path: Path) -> None:
    model = learned(tmp_path / "model", feedback(tmp_path / "said.jsonl", 0, 4000, 3000), 0, epochs=8)
    found = judged(model, 0)
    print(found)
    assert found["auc"][0] >= ENOUGH * found["auc"][1]
    assert all(found[one.name][0] <= WITHIN for one in CRITERIA)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_seed_comes_close_and_thumbs_gain_from_the_other_heads(tmp_path: Path, seed: int) -> None:
    file = feedback(tmp_path / "said.jsonl", seed, 4000, 3000)
    found = judged(learned(tmp_path / "model", file, seed, epochs=8), seed)
    apart: dict[str, Any] = {}
    for one in HEADS:
        alone = learned(tmp_path / one.name, file, seed, epochs=8, heads=(one,))
        apart.update(judged(alone, seed))
    print(f"seed {seed}: together {found}\napart {apart}")
    assert found["auc"][0] >= ENOUGH * found["auc"][1]
    assert found["pairs"][0] >= found["pairs"][1] - 0.03
    assert all(found[one.name][0] <= WITHIN for one in CRITERIA)
    assert found["auc"][0] > apart["auc"][0]
    assert found["pairs"][0] > apart["pairs"][0]
