import hashlib
import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.reward.reward_source import BadReward, Rewards, Sample, ScoredBy
from penstock.workloads.prompts.categories import TOKEN_PRICE, Category, QualityReward, classify
from penstock.workloads.prompts.checked_reward import (
    JUDGED_BY,
    MOST_WAITING,
    CheckedReward,
    NeedsPerson,
    NoSuchCheck,
    SourceReward,
    source_reward,
)
from penstock.workloads.prompts.embeddings import (
    WIDTH,
    EmbeddingError,
    HashingEmbedder,
    HttpEmbedder,
    read_reply,
)
from penstock.workloads.prompts.features import (
    LONGEST_TOKENS,
    MAX_CHARACTERS,
    MUTATION_TYPES,
    SECTIONS,
    PromptError,
    features_of,
    mutate,
    offered,
    read_prompt,
    token_count,
)
from penstock.workloads.prompts.task_parts import PromptSource, parts_of
from penstock.workloads.prompts.tasks import LENGTH, PromptTask
from tests.support.prompts.json_server import JsonServer

OF_OTHERS = {
    "Write a Python function that reverses a linked list": Category.CODE_GENERATION,
    "Can you review this pull request and point out bugs?": Category.CODE_REVIEW,
    "Draft a blog post about remote work": Category.CONTENT_WRITING,
    "We need a catchy slogan for our new running shoes": Category.MARKETING_COPY,
    "Analyze the sales data and find trends by region": Category.DATA_ANALYSIS,
    "What is the capital of Australia?": Category.GENERAL_QA,
    "Compose a haiku about autumn leaves": Category.CREATIVE_WRITING,
    "日本の首都": Category.GENERAL_QA,
    "asdf": Category.GENERAL_QA,
}


@pytest.mark.parametrize("prompt", OF_OTHERS)
def test_prompts_as_people_write_them_are_classified(prompt: str) -> None:
    assert classify(read_prompt(prompt)) is OF_OTHERS[prompt]


def test_template_prompts_keep_their_category_after_mutations() -> None:
    random, source = np.random.default_rng(3), PromptSource()
    for _ in range(500):
        prompt, category = source.draw(random)
        assert classify(prompt) is category
        for action in range(5):
            prompt = mutate(prompt, action)
        assert classify(prompt) is category


class Length:
    def score(self, samples: list[Sample]) -> Rewards:
        return Rewards(tuple(len(one.response) / 10 for one in samples), ScoredBy(name="length"))

    def close(self) -> None:
        """Nothing is open."""


def reward_of(every: int) -> CheckedReward:
    """One of the source; its texts have one token each."""
    return CheckedReward(SourceReward(Length()), every=every)  # type: ignore[arg-type]


def test_one_score_in_many_waits_for_a_person() -> None:
    reward = reward_of(3)
    earned = [reward.of("a", "a" * number, "a" * (number + 1)) for number in range(1, 7)]
    assert earned == pytest.approx([0.1] * 6)
    assert reward.of("a", "a", "a") == 0.0
    assert [(one.before, one.after) for one in reward.waiting()] == [("aaa", "aaaa"), ("a" * 6, "a" * 7)]


def test_a_person_agrees_or_does_not() -> None:
    reward = reward_of(1)
    reward.of("a", "a", "aa")
    reward.of("a", "aa", "a")
    one, other = reward.waiting()
    reward.answer(one.id, "after")
    reward.answer(other.id, "after")
    assert reward.checked() == (2, 1)
    with pytest.raises(NoSuchCheck):
        reward.answer(one.id, "after")
    with pytest.raises(NoSuchCheck):
        reward.find("absent")


def test_without_a_persons_answer_no_further_scores_are_given() -> None:
    reward = reward_of(1)
    for _ in range(MOST_WAITING):
        reward.of("a", "a", "aa")
    with pytest.raises(NeedsPerson, match="wait for a person"):
        reward.of("a", "a", "aa")
    reward.answer(reward.waiting()[0].id, "after")
    assert reward.of("a", "a", "aa") == pytest.approx(0.1)


def test_a_source_that_people_disagree_with_is_no_longer_used() -> None:
    reward = reward_of(1)
    for number in range(JUDGED_BY):
        reward.of("a", "a", "aa")
        reward.answer(reward.waiting()[0].id, "after" if number < JUDGED_BY // 2 - 1 else "before")
    with pytest.raises(NeedsPerson, match=f"4 of the last {JUDGED_BY}"):
        reward.of("a", "a", "aa")


def test_rows_are_of_unit_length_and_equal_on_every_machine() -> None:
    rows = HashingEmbedder().embed(["Write a poem.", "日本語で書いて 😀", "x" * 20_000])
    assert rows.shape == (3, WIDTH)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    signs = np.sign(np.where(np.abs(rows[0]) > 1e-4, rows[0], 0)).astype(np.int8).tobytes()
    likeness = HashingEmbedder().embed(["review this code", "Reviewing the codes", "a poem on rain", ""])
    assert likeness[0] @ likeness[1] > 0.2 > abs(likeness[0] @ likeness[2])
    assert not likeness[3].any()
    assert hashlib.sha256(signs).hexdigest()[:16] == "19da86a397d2f678"


def numbers(text: str) -> list[float]:
    """What stands for a model: the same for equal texts."""
    drawn: list[float] = np.random.default_rng(list(text.encode())).normal(size=384).tolist()
    return drawn


def embedded(body: Any) -> dict[str, Any]:
    """In the reverse order, as a server may."""
    data = [{"index": index, "embedding": numbers(text)} for index, text in enumerate(body["input"])]
    return {"object": "list", "data": data[::-1]}


def test_embeddings_keep_angles_and_are_cached(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-key\n")
    with JsonServer(embedded) as server:
        embedder = HttpEmbedder(f"{server.url}/v1/embeddings", model="small", key_file=str(tmp_path / "key"))
        rows = embedder.embed(["one", "two", "one"])
        again = embedder.embed(["two", "three"])
        asked, keys = server.asked, server.keys
    assert rows.shape == (3, WIDTH)
    plain = np.array([numbers(text) for text in ("one", "two", "one")])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ rows.T, plain @ plain.T, atol=1e-5)
    np.testing.assert_array_equal(again[0], rows[1])
    assert [one["input"] for one in asked] == [["one", "two"], ["three"]]
    assert asked[0]["model"] == "small"
    assert keys == ["Bearer secret-key"] * 2
    row = np.arange(1.0, WIDTH + 1)
    whole = json.dumps({"data": [{"index": 0, "embedding": row.tolist()}]}).encode()
    np.testing.assert_allclose(read_reply(whole, 1, "there")[0], row / np.linalg.norm(row), rtol=1e-6)


def test_temporary_failures_are_retried_and_refusals_are_not() -> None:
    statuses = [429, 503]
    with JsonServer(lambda body: statuses.pop() if statuses else embedded(body)) as server:
        embedder = HttpEmbedder(f"{server.url}/v1/embeddings", model="small")
        assert embedder.embed(["one"]).any()
        statuses.append(400)
        with pytest.raises(EmbeddingError, match=r"v1/embeddings: status 400"):
            embedder.embed(["two"])
        assert len(server.asked) == 4
    away = HttpEmbedder(f"{server.url}/v1/embeddings", model="small", deadline_s=0.2)
    with pytest.raises(EmbeddingError, match=r"v1/embeddings: no embeddings within 0.2 s: Connection"):
        away.embed(["one"])


@pytest.mark.parametrize(
    "reply",
    [
        b"no JSON", b"{}", b"[]", b'{"data": 3}', b'{"data": []}', b"[" * 100_000,
        b'{"data": [{"index": 1, "embedding": [1]}]}', b'{"data": [{"index": 0, "embedding": [NaN]}]}',
        b'{"data": [{"index": 0, "embedding": [0, 0]}]}', b'{"data": [{"index": 0, "embedding": "abc"}]}',
        b'{"data": [{"index": 0, "embedding": [[1, 2]]}]}',
        json.dumps({"data": [{"index": 0, "embedding": [1.0] * (WIDTH + 1)}]}).encode(),
    ],
)  # fmt: skip
def test_a_reply_without_embeddings_is_an_error_that_names_the_server(reply: bytes) -> None:
    with pytest.raises(EmbeddingError, match=r"^there: "):
        read_reply(reply, 1, "there")


def test_a_key_is_never_sent_in_plaintext_nor_shown_in_a_message(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key")
    for url, file in (
        ("http://example.com/v1", key),
        ("https://me:secret-key@example.com", ""),
        ("ftp://x", ""),
    ):
        with pytest.raises(ConfigurationError, match="embedding") as error:
            HttpEmbedder(url, model="small", key_file=str(file))
        assert "secret-key" not in str(error.value)
    with pytest.raises(ConfigurationError, match="embedding_key_file=.*cannot be read"):
        HttpEmbedder("https://example.com", model="small", key_file=str(tmp_path / "absent"))


ACTIONS = range(len(MUTATION_TYPES))
PIECES = (
    *SECTIONS, "Write a poem.", "please", "thank you",
    "if you cannot", "for", "example", "first", "then",
    "at most", "1.", "Erklär mir das", "日本語で書いて",
    "😀", "\n", "\n\n", " ", ",", "kindly,", "must",
)  # fmt: skip
TEXTS = st.one_of(
    st.text(min_size=1, max_size=200),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map(" ".join),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("\n\n".join),
)


def applied(prompt: str, actions: tuple[int, ...]) -> str:
    """The prompt after mutations, one after another."""
    for action in actions:
        prompt = mutate(prompt, action)
    return prompt


def is_a_prompt(text: str) -> bool:
    try:
        read_prompt(text)
    except PromptError:
        return False
    return True


@example("please \x1b")
@given(TEXTS.filter(is_a_prompt))
def test_a_mutation_adds_its_feature_once_and_changes_no_other(prompt: str) -> None:
    before = features_of(read_prompt(prompt))
    for action in ACTIONS:
        after = mutate(prompt, action)
        wanted = tuple(one or number == action for number, one in enumerate(before))
        assert features_of(after) == wanted
        assert mutate(after, action) == after
        assert (after == read_prompt(prompt)) == before[action]


@given(TEXTS.filter(is_a_prompt), st.permutations(list(ACTIONS)), st.permutations(list(ACTIONS)))
def test_the_order_of_mutations_does_not_matter(prompt: str, one: list[int], other: list[int]) -> None:
    assert applied(prompt, tuple(one)) == applied(prompt, tuple(other))
    assert applied(prompt, tuple(one[:3])) == applied(prompt, tuple(sorted(one[:3])))


def test_each_mutation_changes_a_request_as_documented() -> None:
    prompt = "Please, write a haiku about rain. Thanks a lot!"
    assert mutate(prompt, 1) == "Write a haiku about rain."
    assert mutate(prompt, 4).startswith(prompt + "\n\nWork in steps:")
    assert read_prompt("  Cafe\u0301\r\nau lait\r ") == "Café\nau lait", "a prompt has one form"
    nested = "thank " * 1600 + "you " * 1600
    assert mutate(nested, 1) == nested.strip(), "and soon"
    longest = "x" * (MAX_CHARACTERS - 5)
    assert [mutate(longest, action) for action in ACTIONS] == [longest] * 5
    whole = "\n\n".join(["Write a haiku about rain.", *SECTIONS])
    assert {applied(prompt, order) for order in permutations(ACTIONS)} == {whole}


def test_a_prompt_that_says_it_already_is_left_alone() -> None:
    prompt = "List three rivers, for example the Elbe. Use at most 20 words. If you cannot, say so."
    assert [mutate(prompt, action) == prompt for action in ACTIONS] == [True, True, True, True, False]
    for action, section in zip((4, 2, 3, 0), SECTIONS, strict=True):
        for text in (f"{section} Write a poem.", section):
            assert mutate(text, action) == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: is empty"),
        (" \n\t ", "prompt: is empty"),
        ("\u200b\u200b", "prompt: is empty"),
        ("x" * (MAX_CHARACTERS + 1), "prompt: 20001 characters, at most 20000; send a shorter one"),
        ("x" * 1_000_000, "prompt: 1000000 characters, at most 20000"),
        ("a\0b", "prompt: holds a null character"),
        ("a\ud800b", "prompt: holds a null character or half of a surrogate pair"),
        (None, "prompt: must be a text, is a NoneType"),
        (b"bytes", "prompt: must be a text, is a bytes"),
    ],
)
def test_an_invalid_prompt_is_refused_by_name(prompt: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        mutate(prompt, 0)


@pytest.mark.parametrize("action", [-1, 5, True, 1.0, "1", None])
def test_an_invalid_action_is_refused_by_name(action: int) -> None:
    with pytest.raises(PromptError, match=r"action=.*: is no mutation; choose one of 0 try-catch-style, 1"):
        mutate("Write a poem.", action)


def test_a_long_prompt_is_offered_nothing_that_lengthens_it() -> None:
    assert offered("Write a poem.") == (True,) * 5
    long = "word " * LONGEST_TOKENS
    assert token_count(read_prompt(long)) == LONGEST_TOKENS
    assert offered(long) == (False, True, False, False, False)


REWARD = QualityReward()


def test_bounds_help_code_and_hurt_a_poem_and_nothing_earns_nothing() -> None:
    for prompt, worth in (("Write a Python script.", 0.6), ("Write a poem.", -0.8)):
        earned = REWARD.of(prompt, prompt, mutate(prompt, 3))
        assert earned == pytest.approx(worth - 16 * TOKEN_PRICE)
        assert REWARD.of(prompt, prompt, prompt) == 0.0


def test_steps_before_examples_pay_and_neither_pays_alone() -> None:
    prompt = "Write a Python script."
    steps = mutate(prompt, 4)
    both = mutate(steps, 2)
    assert REWARD.of(prompt, prompt, steps) < 0
    assert REWARD.of(prompt, prompt, mutate(prompt, 2)) < 0
    sum_of_steps = REWARD.of(prompt, prompt, steps) + REWARD.of(prompt, steps, both)
    assert sum_of_steps == pytest.approx(REWARD.of(prompt, prompt, both))
    assert sum_of_steps > 0.7


PROMPT = "Write a poem."
ASKED: list[str] = []


def section_count(prompts: list[str], texts: list[str]) -> list[float | None]:
    """One for each section, none for a text of one word; `prompts` are those that the episodes began with."""
    assert set(prompts) == {PROMPT}
    ASKED.extend(texts)
    return [float(text.count("\n\n")) if " " in text else None for text in texts]


SOURCE = f"{__name__}:section_count"


def test_a_step_earns_a_difference_of_scores_and_scores_each_text_once() -> None:
    ASKED.clear()
    reward = source_reward(SOURCE)
    bound = mutate(PROMPT, 3)
    assert reward.of(PROMPT, PROMPT, bound) == pytest.approx(1 - 16 * TOKEN_PRICE)
    assert reward.of(PROMPT, bound, bound) == 0.0
    reward.of(PROMPT, bound, mutate(bound, 0))
    assert ASKED == [PROMPT, bound, mutate(bound, 0)]


def test_a_source_without_a_score_or_that_is_none_is_named() -> None:
    with pytest.raises(BadReward, match="section_count: gave no score"):
        source_reward(SOURCE).of(PROMPT, PROMPT, "word")
    for place in ("somewhere", "no.such.module:function", "/a/folder", "http://"):
        with pytest.raises(ConfigurationError, match=r"http|cannot be loaded"):
            source_reward(place)


def test_each_setting_has_its_part() -> None:
    found = parts_of({"embedding": "http", "embedding_url": "http://127.0.0.1:1/", "reward": "ratings"})
    assert isinstance(found.embedder, HttpEmbedder)
    assert (found.reward, found.needs_people) == (None, True)
    task = PromptTask(reward_source=SOURCE)
    assert isinstance(task._parts.reward, SourceReward)
    task.close()
    checked = parts_of({"reward_source": SOURCE, "human_check_every": 5})
    assert isinstance(checked.reward, CheckedReward)
    assert checked.needs_people
    assert not parts_of({}).needs_people


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ({"human_check_every": 5}, "human_check_every"),
        ({"human_check_every": -1, "reward_source": SOURCE}, "human_check_every=-1"),
        ({"human_check_every": True, "reward_source": SOURCE}, "human_check_every=True"),
        ({"human_check_every": 1.5, "reward_source": SOURCE}, "human_check_every=1.5"),
        ({"reward": "ratings", "reward_source": SOURCE}, "reward='ratings'"),
        ({"embedding": "http"}, "embedding_url"),
        ({"embedding": "minilm"}, "embedding='minilm'"),
        *(
            ({name: "other"}, rf"environment\.kwargs\.{name}='other'.*one of")
            for name in ("prompts", "split", "reward")
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(task: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parts_of(task)


@pytest.mark.parametrize("task", [{"reward": "ratings"}, {"reward_source": SOURCE, "human_check_every": 3}])
def test_an_actor_has_no_people_who_rate(task: dict[str, Any]) -> None:
    made = gymnasium.make("penstock.workloads.prompts.tasks:Prompts-v0", **task)
    assert made.action_space.n == 5  # type: ignore[attr-defined]
    made.reset(seed=1)
    assert math.isnan(float(made.step(0)[1]))
    with pytest.raises(ConfigurationError, match="over HTTP"):
        made.step(0)
    made.close()


def test_an_episode_ends_after_five_steps_by_itself() -> None:
    task = gymnasium.make("penstock.workloads.prompts.tasks:Prompts-v0").unwrapped
    check_env(task, skip_render_check=True)
    assert task.observation_space == gymnasium.spaces.Box(-1.0, 1.0, (1536,), np.float32)
    assert task.action_space == gymnasium.spaces.Discrete(5)
    observation, info = task.reset(seed=1)
    assert np.linalg.norm(observation) == pytest.approx(1.0, abs=1e-6)
    ends = []
    for action in range(LENGTH):
        observation, _, terminated, truncated, info = task.step(np.int64(action))
        ends.append((terminated, truncated))
    assert ends == [(False, False)] * 4 + [(True, False)]
    assert "Work in steps" in info["prompt"]
    assert info["action_mask"].tolist() == [1] * 5


def test_seeds_repeat_prompts_and_tests_are_of_other_subjects() -> None:
    drawn = {}
    for split in ("train", "test"):
        random, source = np.random.default_rng(0), PromptSource("builtin", split)
        drawn[split] = [source.draw(random)[0] for _ in range(1000)]
    assert not set(drawn["train"]) & set(drawn["test"])
    one, other = PromptTask(), PromptTask()
    assert one.reset(seed=4)[1]["prompt"] == other.reset(seed=4)[1]["prompt"]
