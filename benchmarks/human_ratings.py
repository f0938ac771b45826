"""What a network of several heads can tell of real people's ratings: three scales of 1 to 10.

    python -m benchmarks.human_ratings      prints a table of docs/chat.md

The package chitchat-dataset (extra `dev`) has 7,168 conversations of two people about 36 topics; 5,988 are
rated for being witty, upbeat and interesting, by whom is not told. Left out are those that say 5 three times,
which nobody has touched, and those in which one person alone has spoken. Topics of the tests are in no
training. Beside the heads stand the number of words and a constant. Intervals of 95 % are bootstrapped over
conversations.
"""

import argparse
import importlib.resources
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from launch.run.child_process import penstock
from workloads.language.heads.heads_model import HeadsModel
from workloads.language.prompt import parse_prompt
from workloads.language.quiet import quieten
from workloads.language.reward.reward_source import Sample

Array = NDArray[np.float64]

KEYS: Final = ("witty", "upbeat", "interesting")
UNTOUCHED: Final = 5
TOKENS: Final = 256
"""That the heads read of a conversation, its end."""
_LAST_WORDS: Final = 80
"""Most words of the last message, which is the response."""
_BASE: Final = ("epochs=1", "batch=32", f"max_tokens={TOKENS}", "held_out=0", "pieces=4096")
_HEADS: Final = (
    "epochs=3", "batch=32", "learning_rate=1e-3", "lora=false", f"max_tokens={TOKENS}",
    "validation_share=0.1",
)  # fmt: skip
_DRAWS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation. scores: of KEYS, 1 to 10; empty where it was not rated, or not touched."""

    name: str
    topic: str
    messages: tuple[str, ...]
    scores: tuple[int, ...]

    @property
    def words(self) -> int:
        """How long it is."""
        return sum(len(one.split()) for one in self.messages)

    @property
    def prompt(self) -> list[dict[str, str]]:
        """All but the last message; the second person is the assistant."""
        return [
            {"role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate(self.messages[:-1])
        ]

    @property
    def response(self) -> str:
        """The end of the last message."""
        return " ".join(self.messages[-1].split()[-_LAST_WORDS:])


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one scale: mean, and lower and upper end of its interval of 95 %."""

    pairs: tuple[float, float, float]
    spearman: tuple[float, float, float]


def talks() -> list[Talk]:
    """Return the conversations in which two people have spoken."""
    file = importlib.resources.files("chitchat_dataset") / "dataset.json"
    found = []
    for name, one in json.loads(file.read_text("utf-8")).items():
        messages = tuple(" ".join(part["text"] for part in said) for said in one["messages"])
        given = one.get("ratings") or {}
        scores = tuple(int(given[key]) for key in KEYS) if given else ()
        if len(messages) > 1:
            rated = () if scores == (UNTOUCHED,) * len(KEYS) else scores
            found.append(Talk(name=name, topic=one.get("prompt") or "", messages=messages, scores=rated))
    return found


def by_heads(train: Sequence[Talk], test: Sequence[Talk], folder: Path, seed: int) -> Array:
    """Return what heads say of conversations that they have not seen, [N, 3]; a base that has not, either."""
    base, judge, rated = folder / "base", folder / "judge", folder / "rated.jsonl"
    read = folder / "read.jsonl"
    _write(read, ({"messages": [*one.prompt, _last(one)]} for one in train))
    _run("chat", "pretrain", read, "--out", base, *_set((*_BASE, f"seed={seed}")))
    _write(
        rated,
        (
            {"prompt": one.prompt, "response": one.response, "key": key, "score": score, "rater": one.name}
            for one in train
            if one.scores
            for key, score in zip(KEYS, one.scores, strict=True)
        ),
    )
    heads = [word for key in KEYS for word in ("--head", f"{key}=1:10")]
    _run("reward", "train", rated, "--model", base, "--out", judge, *heads, *_set((*_HEADS, f"seed={seed}")))
    model = HeadsModel.load(judge)
    samples = [Sample(prompt=parse_prompt(one.prompt), response=one.response) for one in test]
    return np.array([[said.shares[key] for key in KEYS] for said in model.judge(samples)])


def by_words(test: Sequence[Talk]) -> Array:
    """Return how long conversations are, [N, 3]."""
    return np.repeat(np.array([[one.words] for one in test], np.float64), len(KEYS), 1)


def measure(said: Sequence[Array], scores: Sequence[Array], seed: int) -> Measured:
    """Return how well numbers order what people said.

    said, scores: of the conversations of each fold, [N]; those of two folds are not compared.
    """
    rng = np.random.default_rng(seed)
    own = [_Pairs(one, score) for one, score in zip(said, scores, strict=True)]
    whole = [np.ones(len(one)) for one in said]
    drawn = [
        [np.bincount(rng.integers(len(one), size=len(one)), minlength=len(one)).astype(float) for one in said]
        for _ in range(_DRAWS)
    ]
    pairs = [_accuracy(own, weights) for weights in [whole, *drawn]]
    ranks = [_spearman(said, scores, weights) for weights in [whole, *drawn]]
    return Measured(_interval(pairs), _interval(ranks))


class _Pairs:
    """Of a fold: where people said that one is better, and how far numbers agree."""

    def __init__(self, said: Array, scores: Array) -> None:
        self.better = (scores[:, None] > scores[None, :]).astype(float)
        self.agree = self.better * (np.sign(said[:, None] - said[None, :]) + 1) / 2


def _accuracy(folds: Sequence[_Pairs], weights: Sequence[Array]) -> float:
    agree = sum(float(weight @ one.agree @ weight) for one, weight in zip(folds, weights, strict=True))
    return agree / sum(
        float(weight @ one.better @ weight) for one, weight in zip(folds, weights, strict=True)
    )


def _spearman(said: Sequence[Array], scores: Sequence[Array], weights: Sequence[Array]) -> float:
    """Return the mean over the folds; of a constant 0."""
    found = []
    for one, score, weight in zip(said, scores, weights, strict=True):
        rows = np.repeat(np.arange(len(one)), weight.astype(int))
        first, second = _ranks(one[rows]), _ranks(score[rows])
        spread = first.std() * second.std()
        found.append(
            float(((first - first.mean()) * (second - second.mean())).mean() / spread) if spread else 0.0
        )
    return float(np.mean(found))


def _ranks(values: Array) -> Array:
    """Return the rank of each, equal values the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ends = count.cumsum()
    ranks: Array = (ends - (count - 1) / 2)[place]
    return ranks


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return values[0], float(low), float(high)


def _last(one: Talk) -> dict[str, str]:
    return {"role": ("user", "assistant")[(len(one.messages) - 1) % 2], "content": one.response}


def _write(file: Path, rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _set(settings: Sequence[str]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def _run(*words: str | Path) -> None:
    subprocess.run(penstock(*map(str, words)), check=True, stdout=subprocess.DEVNULL)


def table(folds: int, seed: int) -> list[str]:
    """Return the lines of the table, as Markdown."""
    every = talks()
    topics = sorted({one.topic for one in every})
    place = dict(zip(topics, np.random.default_rng(seed).permutation(len(topics)) % folds, strict=True))
    said: dict[str, list[Array]] = {"heads": [], "words": [], "constant": []}
    scores = list[Array]()
    for fold in range(folds):
        test = [one for one in every if one.scores and place[one.topic] == fold]
        train = [one for one in every if place[one.topic] != fold]
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            said["heads"].append(by_heads(train, test, Path(folder), seed))
        said["words"].append(by_words(test))
        said["constant"].append(np.zeros((len(test), len(KEYS))))
        scores.append(np.array([one.scores for one in test], np.float64))
    lines = [f"{sum(map(len, scores))} conversations, {len(topics)} topics, {folds} folds"]
    for name, own in said.items():
        for number, key in enumerate(KEYS):
            found = measure([one[:, number] for one in own], [one[:, number] for one in scores], seed)
            lines.append(f"| {name} | {key} | {_text(found.pairs)} | {_text(found.spearman)} |")
    return lines


def _text(one: tuple[float, float, float]) -> str:
    return f"{one[0]:.3f} ({one[1]:.3f} to {one[2]:.3f})"


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description="What heads can tell of real people's ratings.")
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    quieten()
    sys.stdout.write("\n".join(table(said.folds, said.seed)) + "\n")


if __name__ == "__main__":
    main()
