"""Generation with the cache draws what the model says, and says what it drew."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.workloads.language.cached_generation import CachedGeneration, Generated, draw
from penstock.workloads.language.tokenizer import load_tokenizer

MOST = 12
PROMPTS = ((1, 20, 21), (1, 22), (1, 23, 24, 25, 26), (1, 27, 28)) * 4


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    """The tiny model."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def backend(model: Any, base: Path) -> CachedGeneration:
    """Of the model."""
    tokenizer = load_tokenizer(str(base))
    made = CachedGeneration(model, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    made.seed(3)
    return made


def recomputed(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of a response by one forward pass over that row alone."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float()
    shares = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return shares.gather(1, torch.tensor(response)[:, None])[:, 0]


def check_shape(made: Generated, eos: int) -> None:
    """Lengths, ends and padding agree."""
    for row in range(len(made.lengths)):
        response = made.response(row)
        assert 1 <= len(response) <= MOST
        assert made.ended[row] == (response[-1] == eos)
        assert eos not in response[:-1]
        assert made.whole[row]
        assert not made.log_prob[row, len(response) :].any()


def test_log_probabilities_are_those_of_a_plain_forward_pass(model: Any, base: Path) -> None:
    made = backend(model, base).generate(PROMPTS, MOST)
    check_shape(made, load_tokenizer(str(base)).eos_token_id)
    assert made.ended.any()
    assert len(set(made.lengths.tolist())) > 3
    for row, prompt in enumerate(PROMPTS):
        expected = recomputed(model, prompt, made.response(row))
        given = made.log_prob[row, : made.lengths[row]]
        np.testing.assert_allclose(given, expected.numpy(), atol=1e-5)


def test_a_prompt_of_several_responses_is_read_once(model: Any, base: Path) -> None:
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    with handle:
        made = backend(model, base).generate(PROMPTS, MOST)
    assert seen[:2] == [4, 16]
    assert len({made.response(row) for row in range(0, 16, 4)}) > 1


def test_equal_seeds_draw_equal_responses(model: Any, base: Path) -> None:
    made = backend(model, base)
    first = made.generate(PROMPTS, MOST)
    second = made.generate(PROMPTS, MOST)
    made.seed(3)
    again = made.generate(PROMPTS, MOST)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert [first.response(row) for row in range(16)] != [second.response(row) for row in range(16)]


def test_the_most_likely_tokens_are_those_of_transformers(model: Any, base: Path) -> None:
    made = backend(model, base).generate(PROMPTS, MOST, deterministic=True)
    for row, prompt in enumerate(PROMPTS[:4]):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, pad_token_id=0
        )[0, len(prompt) :]
        assert list(made.response(row)) == expected.tolist()


def test_tokens_are_drawn_as_often_as_the_model_says(model: Any, base: Path) -> None:
    prompt = PROMPTS[0]
    made = backend(model, base).generate([prompt] * 4000, 1)
    with torch.inference_mode():
        shares = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    counts = np.bincount(made.tokens[:, 0], minlength=len(shares))
    common = shares * 4000 >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(shares[common], shares[~common].sum()) * 4000
    squared = float((((observed - expected) ** 2) / np.maximum(expected, 1e-9)).sum())
    freedom = len(observed) - 1
    # Wilson and Hilferty (1931): a χ² to the third root is nearly normal; 3.72 standard deviations.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert squared < bound


def test_a_token_without_a_share_is_never_drawn() -> None:
    shares = torch.full((4000, 6), -torch.inf)
    shares[:, 1], shares[:, 4] = np.log(0.999), np.log(0.001)
    drawn = draw(shares, torch.rand(4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert set(drawn.tolist()) == {1, 4}


def test_generation_that_is_stopped_returns_what_there_is(model: Any, base: Path) -> None:
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    made = backend(model, base).generate(PROMPTS, MOST, is_over=is_over)
    assert made.tokens.shape == (16, 3)
    assert not made.whole.all()
    np.testing.assert_array_equal(made.whole, made.ended)


def test_generation_that_never_began_returns_nothing(model: Any, base: Path) -> None:
    made = backend(model, base).generate(PROMPTS, MOST, is_over=lambda: True)
    assert made.tokens.shape == (16, 0)
    assert not made.lengths.any()
    assert not made.whole.any()
