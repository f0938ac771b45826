"""A reward model scores the same in each process that loads it, however its rows are laid out."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.reward import reward_model
from penstock.workloads.language.reward import reward_model as networks
from penstock.workloads.language.reward.reward_model import Network, RewardModel
from penstock.workloads.language.reward.reward_source import (
    BadSample,
    Sample,
    sample_from_proto,
    sample_to_proto,
)
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.rlhf.sentiment import WORDS
from tests.support.language.tiny_reward import disturbed, make_reward_model, samples

SAMPLES = samples()


def saved(base: Path, folder: Path, *, lora: bool = True) -> tuple[Path, list[float]]:
    """A model's folder, and the scores that it gave before it was saved."""
    return folder, make_reward_model(base, folder, lora=lora)


@pytest.mark.parametrize("lora", [True, False])
def test_scores_survive_save_and_load(base: Path, tmp_path: Path, lora: bool) -> None:
    folder, scores = saved(base, tmp_path / "reward", lora=lora)
    loaded = RewardModel.load(folder)
    rewards = loaded.score(SAMPLES)
    assert np.ptp(scores) > 0.1
    assert rewards.values == pytest.approx(scores, abs=1e-6)
    assert (0.25, 2.0, "reward") == (rewards.by.mean, rewards.by.std, rewards.by.name)


def test_transformers_and_peft_alone_give_the_same_scores(base: Path, tmp_path: Path) -> None:
    folder, scores = saved(base, tmp_path / "reward")
    network, tokenizer = plainly(base, folder)
    for sample, score in zip(SAMPLES, scores, strict=True):
        inputs = tokenizer(f"{sample.prompt} {sample.response} <eos>", return_tensors="pt")
        with torch.no_grad():
            (logit,) = network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[
                0
            ]
        assert float(logit) == pytest.approx(score, abs=1e-5)
    assert {"mean": 0.25, "std": 2.0, "max_tokens": 64} == network.config.reward


def plainly(base: Path, folder: Path) -> tuple[Network, Any]:
    """Network and tokenizer, as docs/rlhf.md says."""
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(base, config=config, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_the_side_of_the_padding_does_not_change_a_score(base: Path, tmp_path: Path) -> None:
    folder, _ = saved(base, tmp_path / "reward")
    network, tokenizer = plainly(base, folder)
    network.double()
    loaded = RewardModel.load(folder)
    loaded.network.double()
    expected = exactly(loaded)
    texts = [f"{one.prompt} {one.response} <eos>" for one in SAMPLES]
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


def exactly(model: RewardModel, chosen: Sequence[Sample] = SAMPLES) -> list[float]:
    """Scores before they are rounded to float32."""
    scores: list[float] = []
    model.network.register_forward_hook(lambda _module, _given, out: scores.extend(out.logits[:, 0].tolist()))
    rows = [model.encode(sample) for sample in chosen]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    networks.score_rows(model.network, rows)
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def test_order_and_company_of_a_row_do_not_change_its_score(base: Path, tmp_path: Path) -> None:
    folder, _ = saved(base, tmp_path / "reward")
    loaded = RewardModel.load(folder)
    scores = loaded.score(SAMPLES).values
    assert loaded.score(SAMPLES[::-1]).values[::-1] == pytest.approx(scores, abs=1e-5)
    assert [loaded.score([sample]).values[0] for sample in SAMPLES] == pytest.approx(scores, abs=1e-5)


def test_batches_stay_below_their_size_and_hold_every_row_once(base: Path) -> None:
    network, encoder = disturbed(base, lora=True)
    rows = [encoder.encode(one.prompt, one.response) for one in SAMPLES]
    widths: list[int] = []
    network.get_input_embeddings().register_forward_hook(
        lambda _module, arguments, _out: widths.append(arguments[0].numel())
    )
    few = networks.score_rows(network, rows, batch_tokens=40)
    assert len(widths) > 5
    assert max(widths) <= 40
    assert few == pytest.approx(networks.score_rows(network, rows), abs=1e-5)


def test_token_ids_are_read_as_they_were_sampled(base: Path, tmp_path: Path) -> None:
    folder, scores = saved(base, tmp_path / "reward")
    loaded = RewardModel.load(folder)
    sample = SAMPLES[0]
    prompt_ids = tuple(loaded.encoder.prompt_ids(sample.prompt))
    response_ids = tuple(loaded.encoder.response_ids(sample.response))
    by_ids = Sample(prompt="x", response="y", prompt_ids=prompt_ids, response_ids=response_ids)
    assert loaded.score([by_ids]).values[0] == pytest.approx(scores[0], abs=1e-6)
    cut_off = Sample(prompt_ids=prompt_ids, response_ids=response_ids[:-1])
    assert loaded.score([cut_off]).values[0] != pytest.approx(scores[0], abs=1e-4)


def test_a_response_that_its_length_ended_is_read_without_an_end(base: Path, tmp_path: Path) -> None:
    folder, _ = saved(base, tmp_path / "reward")
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


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(response_ids=(4, 10_000)), "token id 10000 of a vocabulary of 36"),
        (Sample(response_ids=(4,) * 65), "the response has 65 tokens, 64 fit"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_refused(
    base: Path, tmp_path: Path, sample: Sample, message: str
) -> None:
    folder, _ = saved(base, tmp_path / "reward")
    with pytest.raises(BadSample, match=message):
        RewardModel.load(folder).score([sample])


def test_another_base_model_is_found_out(base: Path, tmp_path: Path) -> None:
    folder, scores = saved(base, tmp_path / "reward")
    tokenizer = load_tokenizer(str(base))
    tiny_models.save(tiny_models.build_model(tokenizer, seed=5), tokenizer, tmp_path / "other")
    with pytest.raises(ConfigurationError, match="is its base model .* another one now"):
        RewardModel.load(folder, base=str(tmp_path / "other"))
    shutil.copytree(base, tmp_path / "moved")
    moved = RewardModel.load(folder, base=str(tmp_path / "moved"))
    assert moved.score(SAMPLES).values == pytest.approx(scores, abs=1e-6)


def test_a_folder_that_holds_none_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name a folder that `penstock rlhf reward train` wrote"):
        RewardModel.load(tmp_path)
    folder, _ = saved(base, tmp_path / "reward")
    adapter = json.loads((folder / "adapter_config.json").read_text())
    adapter["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ConfigurationError, match="say where it is with --base"):
        RewardModel.load(folder)


def test_the_sha256_names_the_scores(base: Path, tmp_path: Path) -> None:
    folder, _ = saved(base, tmp_path / "reward")
    shutil.copytree(folder, tmp_path / "copy")
    other, _ = saved(base, tmp_path / "other", lora=False)
    first, copy, full = (reward_model.weights_sha256(one) for one in (folder, tmp_path / "copy", other))
    assert first == copy
    assert first != full


def test_nothing_that_is_saved_can_run_code(base: Path, tmp_path: Path) -> None:
    folder, _ = saved(base, tmp_path / "reward")
    names = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert names <= {".json", ".safetensors", ".md", ".jinja", ".txt"}


def test_the_vocabulary_of_the_tiny_model_fits() -> None:
    tokenizer = tiny_models.build_tokenizer(WORDS)
    assert len(WORDS) + 4 == len(tokenizer) <= 64
    assert 3 == len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id})
    network = tiny_models.build_model(tokenizer, seed=0)
    assert 50_000 < sum(weight.numel() for weight in network.parameters()) < 200_000
