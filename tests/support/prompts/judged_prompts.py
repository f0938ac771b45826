import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import parse_toml
from penstock.launch.run.supervisor import penstock
from penstock.policy.weights import load_into
from penstock.workloads.plugin.acting import policy_maker
from penstock.workloads.plugin.serving import read_final
from penstock.workloads.prompts.categories import PromptReward, QualityReward
from penstock.workloads.prompts.embeddings import Embedder
from penstock.workloads.prompts.features import MUTATION_TYPES, mutate, read_prompt
from penstock.workloads.prompts.task_parts import PromptSource, parts_of


@dataclass(frozen=True, slots=True, eq=False)
class TextGraph:
    """The texts that a prompt becomes, and what leads from one to the next.

    texts: n of them, at most 32, the prompt itself first. after: int64 [n, 5], the text that each mutation
    makes of each. reward: float64 [n, 5], what that earns.
    """

    texts: tuple[str, ...]
    after: NDArray[np.int64]
    reward: NDArray[np.float64]

    def optimum(self, steps: int) -> float:
        """Return the most that so many steps earn."""
        value = np.zeros(len(self.texts))
        for _ in range(steps):
            value = (self.reward + value[self.after]).max(1)
        return float(value[0])

    def expected(self, steps: int, policy: NDArray[np.float64] | None = None) -> float:
        """Return what so many steps earn on average.

        policy: float64 [n, 5], the probability of each mutation of each text; None: all are as likely.
        """
        likely = np.full(self.reward.shape, 1 / len(MUTATION_TYPES)) if policy is None else policy
        value = np.zeros(len(self.texts))
        for _ in range(steps):
            value = (likely * (self.reward + value[self.after])).sum(1)
        return float(value[0])

    def followed(self, actions: Sequence[int]) -> float:
        """Return what these mutations earn, one after another."""
        place, total = 0, 0.0
        for action in actions:
            total += float(self.reward[place, action])
            place = int(self.after[place, action])
        return total


def text_graph(prompt: str, reward: PromptReward) -> TextGraph:
    """Return the graph of a prompt under a reward; raises PromptError for a text that is no prompt."""
    start = read_prompt(prompt)
    texts, after, earned = [start], [], []
    for text in texts:  # grows while it is walked
        reached = [mutate(text, action) for action in range(len(MUTATION_TYPES))]
        texts += [one for one in dict.fromkeys(reached) if one not in texts]
        after.append([texts.index(one) for one in reached])
        earned.append([reward.of(start, text, one) for one in reached])
    return TextGraph(tuple(texts), np.array(after, np.int64), np.array(earned, np.float64))


CORPUS: Final = "chatterbot"
PROMPTS: Final = 400
STEPS: Final = 5
_SEED: Final = 20_000
_TOTAL_STEPS: Final = 98_304


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """score: between random mutations (0) and the optimum (1). error: its standard error over the prompts."""

    score: float
    error: float


@cache
def graphs(split: str, source: str = CORPUS) -> tuple[TextGraph, ...]:
    """Return the texts that prompts of a split become, under the reward of the workload."""
    random, prompts, reward = np.random.default_rng(_SEED), PromptSource(source, split), QualityReward()
    return tuple(text_graph(prompts.draw(random)[0], reward) for _ in range(PROMPTS))


def judged(earned: Sequence[float], source: str = CORPUS) -> Judged:
    """Return the score of returns of the prompts of the tests, in order."""
    least = np.array([graph.expected(STEPS) for graph in graphs("test", source)])
    most = np.array([graph.optimum(STEPS) for graph in graphs("test", source)])
    gained, room = np.array(earned) - least, most - least
    score = gained.mean() / room.mean()
    # Of a ratio of means, by the first order of its expansion.
    error = (gained - score * room).std(ddof=1) / room.mean() / np.sqrt(len(gained))
    return Judged(score=float(score), error=float(error))


def fixed(source: str = CORPUS) -> Judged:
    """Return the score of the sequence that earns most on the prompts of training."""
    ways = combinations_with_replacement(range(len(MUTATION_TYPES)), STEPS)  # their order changes no sum
    train = graphs("train", source)
    best = max(ways, key=lambda way: sum(graph.followed(way) for graph in train))
    return judged([graph.followed(best) for graph in graphs("test", source)], source)


def judge(run: Path, source: str = CORPUS) -> Judged:
    """Return the score of the final policy of a run, at its most likely actions."""
    final = read_final(run)
    policy = policy_maker(final.specification, None)()
    load_into(policy, final.blob)
    # Of the run's folder: a specification hides places, such as the address of an embedding server.
    kwargs = parse_toml(run / CONFIG_FILE)["environment"]["kwargs"]
    embedder = parts_of(kwargs | {"prompts": source, "split": "test"}).embedder
    earned = [
        graph.expected(STEPS, np.eye(5)[_chosen(policy, embedder, graph.texts)])
        for graph in graphs("test", source)
    ]
    return judged(earned, source)


def _chosen(policy: Any, embedder: Embedder, texts: Sequence[str]) -> NDArray[np.int64]:
    step = policy.step({"observation": embedder.embed(texts)})
    chosen: NDArray[np.int64] = policy.distribution(step.parameters)["action/probability"].argmax(1)
    return chosen


def train(seed: int, folder: Path) -> None:
    """Train the recipe on the prompts of the corpus; raises CalledProcessError where it fails."""
    options = ("--seed", str(seed), "--total-steps", str(_TOTAL_STEPS), "--run-dir", str(folder), "--json")
    # A setting of a table replaces the whole table.
    task = ("--set", f'environment.kwargs={{prompts = "{CORPUS}"}}')
    command = penstock("train", "penstock/recipes/prompts.toml", *options, *task)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
