import json
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.actor.acting.masks import learner_reward
from penstock.actor.rollout.generator import HeaderFields
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.fragment import Fragment, check
from penstock.protocol.messages import Episode, Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.runtime.exit import Fatal
from penstock.workloads.language.cached_generation import CachedGeneration, Generated, draw
from penstock.workloads.language.conversation import ColumnFragments
from penstock.workloads.language.reward.reward_source import (
    BadReward,
    Rewards,
    RewardSource,
    Sample,
    ScoredBy,
    Unavailable,
)
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.rlhf.responses import (
    Prompts,
    PromptTokens,
    RewardScorer,
    columns_of,
    in_random_order,
    read_prompts,
)

PAD, EOS = 0, 2
MOST = 12
PROMPTS = ((1, 20, 21), (1, 22), (1, 23, 24, 25, 26), (1, 27, 28)) * 4


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@pytest.fixture
def backend(model: Any) -> CachedGeneration:
    made = CachedGeneration(model, end_ids=(EOS,), pad_id=PAD)
    made.seed(3)
    return made


def test_log_probabilities_are_those_of_a_plain_forward_pass(model: Any, backend: CachedGeneration) -> None:
    made = backend.generate(PROMPTS, MOST)
    assert made.whole.all()
    assert made.ended.any()
    assert len(set(made.lengths.tolist())) > 3
    for row, prompt in enumerate(PROMPTS):
        response = made.response(row)
        assert 1 <= len(response) <= MOST
        assert made.ended[row] == (response[-1] == EOS)
        assert EOS not in response[:-1]
        assert not made.log_prob[row, len(response) :].any()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float()
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(response)[:, None])
        np.testing.assert_allclose(made.log_prob[row, : len(response)], expected[:, 0].numpy(), atol=1e-5)


def test_each_of_several_end_tokens_ends_a_response(model: Any) -> None:
    ends = (EOS, 21, 24, 30)
    made = CachedGeneration(model, end_ids=ends, pad_id=PAD)
    made.seed(3)
    found = made.generate(PROMPTS, MOST)
    responses = [found.response(row) for row in range(len(PROMPTS))]
    assert len({one[-1] for one in responses} & set(ends)) > 1
    assert all(not set(ends) & set(one[:-1]) for one in responses)
    assert found.ended.tolist() == [one[-1] in ends for one in responses]


def test_a_prompt_of_several_responses_is_read_once(model: Any, backend: CachedGeneration) -> None:
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    with handle:
        made = backend.generate(PROMPTS, MOST)
    assert seen[:2] == [4, 16]
    assert len({made.response(row) for row in range(0, 16, 4)}) > 1


def test_equal_seeds_draw_equal_responses(backend: CachedGeneration) -> None:
    first, second = (backend.generate(PROMPTS, MOST) for _ in range(2))
    backend.seed(3)
    again = backend.generate(PROMPTS, MOST)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert [first.response(row) for row in range(16)] != [second.response(row) for row in range(16)]


def test_the_most_likely_tokens_are_those_of_transformers(model: Any, backend: CachedGeneration) -> None:
    made = backend.generate(PROMPTS, MOST, deterministic=True)
    for row, prompt in enumerate(PROMPTS[:4]):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, pad_token_id=0
        )[0, len(prompt) :]
        assert list(made.response(row)) == expected.tolist()


def test_tokens_are_drawn_with_the_models_probabilities(model: Any, backend: CachedGeneration) -> None:
    prompt = PROMPTS[0]
    made = backend.generate([prompt] * 4000, 1)
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


def test_a_token_with_probability_zero_is_never_sampled() -> None:
    shares = torch.full((4000, 6), -torch.inf)
    shares[:, 1], shares[:, 4] = np.log(0.999), np.log(0.001)
    drawn = draw(shares, torch.rand(4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert set(drawn.tolist()) == {1, 4}


def test_stopped_generation_returns_the_tokens_so_far(backend: CachedGeneration) -> None:
    asked = 0

    def is_over() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    made = backend.generate(PROMPTS, MOST, is_over=is_over)
    assert made.tokens.shape == (16, 3)
    assert not made.whole.all()
    np.testing.assert_array_equal(made.whole, made.ended)
    none = backend.generate(PROMPTS, MOST, is_over=lambda: True)
    assert none.tokens.shape == (16, 0)
    assert not none.lengths.any()
    assert not none.whole.any()


WORDS = ("apple", "bird", "book", "chair", "city", "door", "field", "house")


def write(folder: Path, *rows: object) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(base: Path, place: str, *, held_out: float = 0.25, seed: int = 0) -> Prompts:
    return read_prompts(place, Encoder(load_tokenizer(str(base)), 4), held_out=held_out, seed=seed)


def test_a_prompt_is_on_one_side_whatever_the_order_of_the_file(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} {b}"} for a in WORDS for b in WORDS[:4]]
    first = read(base, write(tmp_path, *rows, *rows[:5]))
    second = read(base, write(tmp_path, *reversed(rows)))
    assert len(first.train) == 24
    assert len(first.held_out) == 8
    assert {one.prompt for one in first.held_out} == {one.prompt for one in second.held_out}
    assert {one.index for one in (*first.train, *first.held_out)} == set(range(32))
    other = read(base, write(tmp_path, *rows), seed=1)
    assert {one.prompt for one in first.held_out} != {one.prompt for one in other.held_out}


def test_unusable_prompts_are_named_and_counted(base: Path, tmp_path: Path) -> None:
    place = write(tmp_path, {"prompt": "apple bird"}, {"response": "x"}, {"prompt": "apple " * 9}, [1])
    made = read(base, place, held_out=0)
    assert made.bad.count == 3
    assert made.bad.shown[0] == "prompts.jsonl line 2: no prompt"
    assert "has 10 tokens, 1 to 4 are allowed" in made.bad.shown[1]
    assert made.held_out == ()


def test_prompts_that_are_all_held_out_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"1 prompts can be used and 1 of them are held out"):
        read(base, write(tmp_path, {"prompt": "apple bird"}))


def test_every_prompt_comes_once_before_one_comes_again(base: Path, tmp_path: Path) -> None:
    prompts = read(base, write(tmp_path, *({"prompt": word} for word in WORDS)), held_out=0).train
    order = [one.index for one in islice(in_random_order(prompts, 3), 24)]
    assert [sorted(order[start : start + 8]) for start in (0, 8, 16)] == [list(range(8))] * 3
    assert order[:8] != order[8:16]
    assert order == [one.index for one in islice(in_random_order(prompts, 3), 24)]
    assert order != [one.index for one in islice(in_random_order(prompts, 4), 24)]


SCHEMA = fragment_schema(Discrete(20), Discrete(20))
ASKED = (
    PromptTokens(7, "a", (1, 10)),
    PromptTokens(7, "a", (1, 10)),
    PromptTokens(3, "b", (1, 11, 12, 13)),
    PromptTokens(4, "c", (1,)),
)
GENERATED = Generated(
    tokens=np.array([[14, 15, EOS], [16, 17, 18], [EOS, PAD, PAD], [14, 14, 14]]),
    log_prob=np.array([[-1, -2, -3], [-4, -5, -6], [-7, 0, 0], [-8, -9, -10]], np.float32),
    lengths=np.array([3, 3, 1, 3]),
    ended=np.array([True, False, True, False]),
    whole=np.array([True, True, True, True]),
)
BY = ScoredBy(name="judge", sha256="ab")


def cut(
    rewards: tuple[float | None, ...],
    generated: Generated = GENERATED,
    fragments: ColumnFragments | None = None,
    sequence: int = 1,
) -> tuple[Fragment, list[Episode]]:
    """A fragment that the broker takes, and its episodes."""
    weights = Publication(version=5, update=4, sha256="", size=0)
    header = HeaderFields(run="r", session=1, sequence=sequence, weights=weights, round=0)
    columns, attributes = columns_of(ASKED, generated, rewards, BY, weights)
    fragment, episodes = (fragments or ColumnFragments(SCHEMA, 4, PAD)).cut(columns, header, attributes)
    check(fragment, SCHEMA, "r")
    return fragment, episodes


def test_every_token_has_its_conventional_place() -> None:
    fragment, _ = cut((0.0, -1.0, 0.5, None))
    arrays: dict[str, Any] = fragment.arrays()
    assert fragment.header.steps == 4
    np.testing.assert_array_equal(
        arrays["observation"].T,
        [[1, 10, 14, 15, EOS], [1, 10, 16, 17, 18], [1, 11, 12, 13, EOS], [1, 14, 14, 14, PAD]],
    )
    np.testing.assert_array_equal(arrays["action"], arrays["observation"][1:])
    valid = [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(arrays["valid"].T, np.array(valid, bool))
    np.testing.assert_array_equal(
        arrays["log_prob"].T, [[0, -1, -2, -3], [0, -4, -5, -6], [0, 0, 0, -7], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(arrays["reward"].T[:, 3], [0.0, -1.0, 0.5, 0.0])
    assert not arrays["reward"][:3].any()
    np.testing.assert_array_equal(arrays["terminated"].T[:, 3], [True, False, True, False])
    np.testing.assert_array_equal(arrays["truncated"].T[:, 3], [False, True, False, False])
    np.testing.assert_array_equal(arrays["final/slot"], [0, 1, 2])
    np.testing.assert_array_equal(arrays["final/observation"], [EOS, 18, EOS])
    assert [(span.version, span.update) for span in fragment.header.weights] == [(5, 4)]


def test_rewards_of_zero_and_of_minus_one_are_rewards() -> None:
    _, episodes = cut((0.0, -1.0, 0.5, None))
    assert [(one.slot_id, one.episode_return, one.length, one.terminated) for one in episodes] == [
        (0, 0.0, 3, True), (1, -1.0, 3, False), (2, 0.5, 1, True),
    ]  # fmt: skip


def test_every_response_is_its_own_episode() -> None:
    fragments = ColumnFragments(SCHEMA, 4, PAD)
    first, _ = cut((1.0, 1.0, 1.0, None), fragments=fragments)
    second, episodes = cut((1.0, 1.0, 1.0, 1.0), fragments=fragments, sequence=2)
    assert [slot.episode_id for slot in first.header.slots] == [0, 0, 0, 0]
    assert [slot.episode_id for slot in second.header.slots] == [1, 1, 1, 0]
    assert {slot.first_step for slot in second.header.slots} == {0}
    assert {one.slot_id: one.length for one in episodes} == {0: 3, 1: 3, 2: 1, 3: 3}


def test_a_batch_that_never_began_has_no_valid_step() -> None:
    nothing = Generated(
        tokens=np.zeros((4, 0), np.int64), log_prob=np.zeros((4, 0), np.float32),
        lengths=np.zeros(4, np.int64), ended=np.zeros(4, bool), whole=np.zeros(4, bool),
    )  # fmt: skip
    fragment, episodes = cut((None, None, None, None), nothing)
    assert not episodes
    assert not fragment.arrays()["valid"].any()


def test_the_header_names_the_reward_model() -> None:
    said = json.loads(cut((0.0, 1.0, None, None))[0].header.attributes)
    assert said == {
        "finish": {"eos": 2, "length": 2},
        "unrewarded": 2,
        "reward": {"name": "judge", "sha256": "ab"},
        "prompts": [7, 7, 3, 4],
    }


def test_wrappers_change_the_learners_rewards_and_no_return() -> None:
    section = EnvironmentSection.model_validate({"reward": [{"scale": 2.0}]})
    fragments = ColumnFragments(SCHEMA, 4, PAD, learner_reward(section))
    fragment, episodes = cut((0.5, -0.5, 1.0, None), fragments=fragments)
    np.testing.assert_array_equal(fragment.arrays()["reward"].T[:, 3], [1.0, -1.0, 2.0, 0.0])
    assert [one.episode_return for one in episodes] == [0.5, -0.5, 1.0]


class Recorder:
    def __init__(self, *answers: Rewards | Exception) -> None:
        self.shown: list[Sample] = []
        self._answers = list(answers)

    def score(self, samples: Sequence[Sample]) -> Rewards:
        self.shown = list(samples)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing is held."""


def rewards(*values: float | None, mean: float | None = None, std: float | None = None) -> Rewards:
    return Rewards(values, ScoredBy(name="model", mean=mean, std=std))


def responses(base: Path) -> tuple[list[PromptTokens], list[tuple[int, ...]]]:
    ids = load_tokenizer(str(base))
    good, bad = (ids.convert_tokens_to_ids(word) for word in ("good", "bad"))
    return [PromptTokens(0, "apple", (1, 9))] * 2, [(good, bad, ids.eos_token_id), (bad, bad)]


def score(base: Path, source: RewardSource, *, is_over: bool = False, **how: bool) -> Rewards | None:
    """What becomes of two responses, of which one ended with <eos> and one did not."""
    tokenizer = load_tokenizer(str(base))
    made = RewardScorer(source, tokenizer, **({"reads_tokens": False, "standardise": False} | how))
    found = made.score(*responses(base), lambda: is_over)
    made.close()
    return found


def test_a_source_gets_text_unless_it_has_the_tokenizer(base: Path) -> None:
    source = Recorder(rewards(1.0, 2.0), rewards(1.0, 2.0))
    score(base, source)
    assert source.shown == [
        Sample(prompt="apple", response="good bad"),
        Sample(prompt="apple", response="bad bad", cut_short=True),
    ]
    score(base, source, reads_tokens=True)
    assert [one.response_ids for one in source.shown] == responses(base)[1]
    assert source.shown[0].prompt_ids == (1, 9)


def test_a_reward_model_reads_eos_for_whichever_token_ended_a_response(base: Path) -> None:
    asked, (ended, _) = responses(base)
    tokenizer, source = load_tokenizer(str(base)), Recorder(rewards(1.0))
    tokenizer.named_ends = [good := ended[0]]
    made = RewardScorer(source, tokenizer, reads_tokens=True, standardise=False)
    made.score(asked[:1], [(ended[1], good)], lambda: False)
    made.close()
    (shown,) = source.shown
    assert (shown.response, shown.cut_short) == ("bad", False)
    assert shown.response_ids == (ended[1], tokenizer.eos_token_id)


def test_an_unavailable_source_is_retried(base: Path) -> None:
    given = score(base, Recorder(Unavailable("away"), Unavailable("away"), rewards(0.0, None)))
    assert given is not None
    assert given.values == (0.0, None)


class Hanging:
    """A source that does not answer before it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def score(self, samples: Sequence[Sample]) -> Rewards:
        self._closed.wait()
        raise Unavailable("closed")

    def close(self) -> None:
        self._closed.set()


@pytest.mark.parametrize("source", [Recorder(Unavailable("away")), Hanging()], ids=["away", "hanging"])
def test_no_reward_is_awaited_when_the_work_is_over(base: Path, source: RewardSource) -> None:
    assert score(base, source, is_over=True) is None


def test_a_permanent_error_of_the_source_ends_the_actor(base: Path) -> None:
    with pytest.raises(Fatal, match=r"environment\.kwargs\.reward: NaN"):
        score(base, Recorder(BadReward("NaN")))


def test_standardised_rewards_are_in_standard_deviations(base: Path) -> None:
    source = Recorder(rewards(3.0, None, mean=1.0, std=4.0), rewards(99.0, -99.0, mean=1.0, std=4.0))
    values = [score(base, source, standardise=True) for _ in range(2)]
    assert [one.values for one in values if one] == [(0.5, None), (5.0, -5.0)]
    with pytest.raises(Fatal, match="does not say the mean and std"):
        score(base, Recorder(rewards(1.0, 2.0)), standardise=True)
