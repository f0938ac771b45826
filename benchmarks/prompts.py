"""The proof that prompts are learned: policies beside the exact optimum, on prompts that training never saw.

    python -m benchmarks.prompts --seeds 1,2,3,4,5       trains, judges, writes the table of docs/prompts.md
    python -m benchmarks.prompts --judge runs/prompts    judges a run that has ended, and records nothing

What a policy earns is put between what random mutations earn (0) and the optimum (1), summed over 400
prompts of the tests. Needs the extra `data`.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.prompt_baselines import STEPS, Case, LinUCB, best_by_category, best_fixed, greedy
from benchmarks.prompt_pictures import draw, write_table
from benchmarks.proof_records import DOCS, RESULTS, commit, machine
from benchmarks.proof_run import PENSTOCK
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.settings import parse_toml
from penstock.policy.weights import load_into
from workloads.plugin.acting import policy_maker
from workloads.plugin.serving import read_final
from workloads.prompts.embeddings import Embedder, HashingEmbedder
from workloads.prompts.prompt_reward import QualityReward
from workloads.prompts.prompt_sources import PromptSource
from workloads.prompts.task_parts import parts_of
from workloads.prompts.text_graph import text_graph

CORPUS: Final = "chatterbot"
PROMPTS: Final = 400
_SEED: Final = 20_000
_TOTAL_STEPS: Final = 98_304
_FILE: Final = RESULTS / "prompts.jsonl"
VARIANTS: Final[dict[str, dict[str, str]]] = {
    "hashing": {},
    "permuted": {"embedding": "permuted"},
    "blind": {"reward": "blind"},
    "minilm": {
        "embedding": "http",
        "embedding_model": "minilm",
        "embedding_url": "http://127.0.0.1:8766/v1/embeddings",
    },
}
"""By name: what differs from the recipe. `minilm` asks `penstock prompts embeddings`, which has to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What somebody earned.

    score: between random mutations (0) and the optimum (1). error: its standard error over the prompts.
    """

    name: str
    seed: int
    score: float
    error: float


@cache
def cases(split: str, source: str = CORPUS) -> tuple[Case, ...]:
    """Return prompts of a split, with the texts that they become under the reward of the workload."""
    random, prompts, reward = np.random.default_rng(_SEED), PromptSource(source, split), QualityReward()
    drawn = (prompts.draw(random) for _ in range(PROMPTS))
    return tuple(Case(category, text_graph(prompt, reward)) for prompt, category in drawn)


def judged(name: str, seed: int, earned: Sequence[float], source: str = CORPUS) -> Judged:
    """Return the score of returns of the prompts of the tests, in order."""
    least = np.array([case.graph.expected(STEPS) for case in cases("test", source)])
    most = np.array([case.graph.optimum(STEPS) for case in cases("test", source)])
    gained, room = np.array(earned) - least, most - least
    score = gained.mean() / room.mean()
    # Of a ratio of means, by the first order of its expansion.
    error = (gained - score * room).std(ddof=1) / room.mean() / np.sqrt(len(gained))
    return Judged(name=name, seed=seed, score=float(score), error=float(error))


def baselines() -> list[Judged]:
    """Return the scores of those that stand beside a learned policy."""
    table = best_by_category(cases("train"))
    bandit = LinUCB(HashingEmbedder(), seed=1)
    bandit.train(cases("train"), episodes=4_000)
    earned = {
        "table": [case.graph.followed(table[case.category]) for case in cases("test")],
        "greedy": [greedy(case) for case in cases("test")],
        "LinUCB": [bandit.earned(case) for case in cases("test")],
    }
    return [fixed(), *(judged(name, 0, returns) for name, returns in earned.items())]


def fixed(source: str = CORPUS) -> Judged:
    """Return the score of the sequence that earns most on the prompts of training."""
    best = best_fixed(cases("train", source))
    return judged("fixed", 0, [case.graph.followed(best) for case in cases("test", source)], source)


def judge(run: Path, name: str, seed: int, source: str = CORPUS) -> Judged:
    """Return the score of the final policy of a run, at its most likely actions."""
    final = read_final(run)
    policy = policy_maker(final.specification, None)()
    load_into(policy, final.blob)
    # Of the run's folder: a specification hides places, such as the address of an embedding server.
    kwargs = parse_toml(run / CONFIG_FILE)["environment"]["kwargs"]
    embedder = parts_of(kwargs | {"prompts": source, "split": "test"}).embedder
    earned = [
        case.graph.expected(STEPS, np.eye(5)[_chosen(policy, embedder, case.graph.texts)])
        for case in cases("test", source)
    ]
    return judged(name, seed, earned, source)


def _chosen(policy: Any, embedder: Embedder, texts: Sequence[str]) -> NDArray[np.int64]:
    step = policy.step({"observation": embedder.embed(texts)})
    chosen: NDArray[np.int64] = policy.distribution(step.parameters)["action/probability"].argmax(1)
    return chosen


def train(variant: str, seed: int, folder: Path) -> None:
    """Train the recipe on the prompts of the corpus; raises CalledProcessError where it fails."""
    options = ("--seed", str(seed), "--total-steps", str(_TOTAL_STEPS), "--run-dir", str(folder), "--json")
    # As one table: a setting of a table replaces the whole of it.
    task = ", ".join(f"{name} = {json.dumps(value)}" for name, value in _task(variant).items())
    said = ("--set", f"environment.kwargs={{{task}}}")
    command = [*PENSTOCK, "train", "recipes/prompts.toml", *options, *said]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _task(variant: str) -> dict[str, str]:
    return {"prompts": CORPUS} | VARIANTS[variant]


def record(results: Sequence[Judged]) -> None:
    """Append a line for each result."""
    with _FILE.open("a") as file:
        for one in results:
            file.write(json.dumps(asdict(one) | {"commit": commit(), "machine": machine()}) + "\n")


def recorded() -> list[Judged]:
    """Return the newest result of every name and seed."""
    lines = [json.loads(line) for line in _FILE.read_text().splitlines()] if _FILE.exists() else []
    newest = {(line["name"], line["seed"]): line for line in lines}
    fields = ("name", "seed", "score", "error")
    return [Judged(**{field: line[field] for field in fields}) for line in newest.values()]


def main() -> None:
    """Judge one run, or train, record and report."""
    options = _parse()
    if options.judge:
        print(json.dumps(asdict(judge(options.judge, options.judge.name, 0))))
        return
    for seed in map(int, filter(None, options.seeds.split(","))):
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            run = Path(folder) / "run"
            train(options.variant, seed, run)
            record([judge(run, options.variant, seed)])
    if options.folders:
        record([judge(run, options.variant, number) for number, run in enumerate(options.folders, 1)])
    if options.baselines:
        record(baselines())
    write_table(recorded(), DOCS / "prompts.md")
    draw(recorded(), DOCS / "images" / "prompts.png")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train prompts, and judge them by the exact optimum.")
    parser.add_argument("--seeds", default="", help="train from these seeds, such as 1,2,3")
    parser.add_argument("--variant", default="hashing", choices=VARIANTS)
    parser.add_argument("--folders", type=Path, nargs="*", help="runs of seeds 1, 2, … that have ended")
    parser.add_argument("--baselines", action="store_true", help="judge the baselines too")
    parser.add_argument("--judge", type=Path, help="the folder of a run: print its score and end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
