"""The prompts, embeddings and rewards of a task, by its settings; the environment and the API use them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.prompts.categories import SUBJECTS, Category, PromptReward, QualityReward
from penstock.workloads.prompts.checked_reward import CheckedReward, source_reward
from penstock.workloads.prompts.embeddings import Embedder, HashingEmbedder, HttpEmbedder
from penstock.workloads.prompts.features import read_prompt

# ---- Prompts to train on, and others to test on: subjects in templates of the seven categories.

_SOURCES: Final = ("builtin", "chatterbot")
_PACKAGE: Final = "chatterbot_corpus"
_TEST_SHARE: Final = 4
"""One of so many subjects is for tests."""
_SHORTEST, _LONGEST = 8, 120
"""Characters of a subject from the corpus."""

TEMPLATES: Final[dict[Category, tuple[str, ...]]] = {
    Category.CODE_GENERATION: (
        "Write a Python function for this: {}", "Implement a class in TypeScript for this request: {}",
        "Create a script for the following. {}", "Build a small program for this: {}",
    ),
    Category.CODE_REVIEW: (
        "Review this code. Users report: {}", "Debug the function behind this report: {}",
        "Do a code review of the patch for this bug: {}", "Find the bug in this code. It shows as: {}",
    ),
    Category.CONTENT_WRITING: (
        "Write an article about this: {}", "Draft a blog post on the following subject: {}",
        "Write a newsletter piece, an essay of sorts, on: {}", "Outline a guide for readers who ask: {}",
    ),
    Category.MARKETING_COPY: (
        "Write ad copy for a brand that stands for: {}", "Create a slogan and a product description for: {}",
        "Write a landing page for customers who say: {}", "Plan a marketing campaign around: {}",
    ),
    Category.DATA_ANALYSIS: (
        "Analyze the dataset on this question: {}", "Summarize the survey data on: {}",
        "Plot the trends in a spreadsheet of answers to: {}", "Look for outliers in the statistics about: {}",
    ),
    Category.GENERAL_QA: (
        "Explain this to me: {}", "Answer this question: {}", "Tell me what is known of this: {}",
        "What would you say to this: {}",
    ),
    Category.CREATIVE_WRITING: (
        "Write a poem about this: {}", "Tell a story that begins so: {}",
        "Compose a song in rhyme on: {}", "Invent a fable with a character who says: {}",
    ),
}  # fmt: skip
_PADDING: Final = (
    "I hope you are well. {} Thank you so much in advance!",
    "I was wondering if you could help. {} I would just like something basically good.",
    "Please, {} Thanks a lot!",
)
_EXTRAS: Final = (
    ("If you cannot do it, say why.", "If this is impossible, answer with a question."),
    ("Give an example.", "Show it with examples, such as one from daily life."),
    ("Use at most 200 words.", "It must fit on a postcard."),
    ("Go through it step by step.", "First say what is asked, then answer."),
)
"""Features in words of the user's own: fallback, examples, constraints, steps."""
_EXTRA_SHARE: Final = 0.15
_PADDED_SHARE: Final = 0.5

_TOPICS: Final[dict[Category, tuple[str, ...]]] = {
    Category.CODE_GENERATION: ("coding",),
    Category.CODE_REVIEW: ("tech_support", "computers"),
    Category.CONTENT_WRITING: ("literature", "history", "politics", "health"),
    Category.MARKETING_COPY: ("money", "food", "sports", "movies"),
    Category.DATA_ANALYSIS: ("science", "psychology"),
    Category.GENERAL_QA: ("trivia", "ai", "botprofile"),
    Category.CREATIVE_WRITING: ("humor", "emotion", "gossip", "greetings", "conversations"),
}
"""The corpus topics of each category."""


class PromptSource:
    """Draws prompts, with equal chances for each category and for each of its subjects.

    source: of the subjects. split: `train`, or `test`, which has other subjects. Raises ConfigurationError
    for another name, and where the corpus is not installed.
    """

    def __init__(self, source: str = "builtin", split: str = "train") -> None:
        _check("prompts", source, _SOURCES)
        _check("split", split, ("train", "test"))
        every = SUBJECTS if source == "builtin" else _corpus()
        self._subjects = {
            category: [one for one in subjects if is_for_tests(one) == (split == "test")]
            for category, subjects in every.items()
        }

    def draw(self, random: np.random.Generator) -> tuple[str, Category]:
        """Return a prompt in the form of `read_prompt`, and the category of its template."""
        category = list(Category)[int(random.integers(len(Category)))]
        subjects, templates = self._subjects[category], TEMPLATES[category]
        subject = subjects[int(random.integers(len(subjects)))]
        prompt = templates[int(random.integers(len(templates)))].format(subject)
        prompt += "" if prompt[-1] in ".?!" else "."
        for extra in _EXTRAS:
            if random.random() < _EXTRA_SHARE:
                prompt += f" {extra[int(random.integers(len(extra)))]}"
        if random.random() < _PADDED_SHARE:
            prompt = _PADDING[int(random.integers(len(_PADDING)))].format(prompt)
        return read_prompt(prompt), category


def _check(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigurationError(f"environment.kwargs.{name}={value!r}: must be one of {', '.join(known)}")


def is_for_tests(subject: str) -> bool:
    """Return whether a subject is for tests, the same on every machine."""
    return hashlib.sha256(subject.encode()).digest()[0] % _TEST_SHARE == 0


def _corpus() -> Mapping[Category, tuple[str, ...]]:
    specification = find_spec(_PACKAGE)
    if specification is None or not specification.submodule_search_locations:
        raise ConfigurationError(
            "environment.kwargs.prompts='chatterbot': chatterbot-corpus is not installed; install "
            "penstock-rl[data], or use 'builtin'"
        )
    folder = Path(specification.submodule_search_locations[0]) / "data" / "english"
    return {
        category: tuple(dict.fromkeys(line for topic in topics for line in _lines(folder, topic)))
        for category, topics in _TOPICS.items()
    }


def _lines(folder: Path, topic: str) -> list[str]:
    import yaml  # noqa: PLC0415 - of the extra that has the corpus

    held = yaml.safe_load((folder / f"{topic}.yml").read_text(encoding="utf-8"))
    lines = (" ".join(str(line).split()) for dialogue in held["conversations"] for line in dialogue)
    return [line for line in lines if _SHORTEST <= len(line) <= _LONGEST]


RATINGS: Final = "ratings"
"""The reward of people's ratings, over HTTP alone."""
_MOST_EVERY: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """The parts of a task. reward: None: people's ratings are the reward. source: of its prompts."""

    source: PromptSource
    embedder: Embedder
    reward: PromptReward | None

    @property
    def needs_people(self) -> bool:
        return self.reward is None or isinstance(self.reward, CheckedReward)

    def close(self) -> None:
        close = getattr(self.reward, "close", None)
        if close is not None:
            close()


_DEFAULTS: Final[Mapping[str, Any]] = {
    "prompts": "builtin", "split": "train", "embedding": "hashing", "embedding_url": "",
    "embedding_model": "", "embedding_key_file": "", "reward": "quality", "reward_source": "",
    "human_check_every": 0,
}  # fmt: skip


def parts_of(arguments: Mapping[str, Any]) -> TaskParts:
    """Return the parts of a task. arguments: those of `PromptTask`."""
    if unknown := arguments.keys() - _DEFAULTS:
        raise ConfigurationError(
            f"environment.kwargs.{min(unknown)}: unknown; use one of {', '.join(_DEFAULTS)}"
        )
    task = {**_DEFAULTS, **arguments}
    return TaskParts(
        source=PromptSource(task["prompts"], task["split"]), embedder=_embedder(task), reward=_reward(task)
    )


def _embedder(task: Mapping[str, Any]) -> Embedder:
    _check("embedding", task["embedding"], ("hashing", "http"))
    if task["embedding"] == "hashing":
        return HashingEmbedder()
    return HttpEmbedder(
        task["embedding_url"], model=task["embedding_model"], key_file=task["embedding_key_file"]
    )


def _reward(task: Mapping[str, Any]) -> PromptReward | None:
    place, every = task["reward_source"], task["human_check_every"]
    if not isinstance(every, int) or isinstance(every, bool) or not 0 <= every <= _MOST_EVERY:
        raise ConfigurationError(
            f"environment.kwargs.human_check_every={every!r}: must be a number from 0 to {_MOST_EVERY}"
        )
    name = task["reward"]
    if not place:
        if every:
            raise ConfigurationError(
                "environment.kwargs.human_check_every: people check a reward_source; name one"
            )
        _check("reward", name, ("quality", RATINGS))
        return None if name == RATINGS else QualityReward()
    if name == RATINGS:
        raise ConfigurationError(
            "environment.kwargs.reward='ratings': excludes reward_source; leave one of them out"
        )
    found = source_reward(place)
    return CheckedReward(found, every=every) if every else found
