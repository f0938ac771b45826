"""The smallest form of the chat: which of eight responses people like, learned to the policy known as best.

`penstock train penstock/recipes/chat-candidates.toml` as processes; what the run left is then asked through a
policy server for the chances of every candidate.
"""

from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.client import PolicyClient
from penstock.workloads.chat.people import CHANGED, USUAL
from penstock.workloads.chat.tasks import CANDIDATES, liked, questions
from tests.support.chat.satisfaction import best_policy, total_variation
from tests.support.run import harness
from tests.support.run.harness import Training

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "chat-candidates.toml"
WITHIN_S: Final = 280.0
CLOSE: Final = 0.05


def served_policy(folder: Path, beta: float, seed: int, *words: str) -> NDArray[np.float64]:
    """The chances of each candidate that a server says for every prompt, after a run of this weight."""
    settings = ("--set", f"algorithm.entropy_coefficient={beta}", *words)
    training = Training(folder / "run", str(RECIPE), "--seed", str(seed), *settings)
    code, _, errors = training.end(WITHIN_S)
    assert code == 0, errors
    assert training.summary()["ledger"]["balanced"]
    seen = np.array([one.features.reshape(-1) for one in questions()], np.float32)
    with (
        harness.server(folder / "server", training.run_dir) as server,
        PolicyClient(server.address) as client,
    ):
        [chances] = client.act_batch(seen, distribution=True).distribution.values()
    return np.asarray(chances, np.float64)


def follows(folder: Path, seed: int, after: int, *words: str) -> None:
    """Four fifths of what the new taste has to give are regained. after: episodes of each environment."""
    middle = (
        "--set",
        f"environment.kwargs.changes_after={after}",
        "--set",
        "algorithm.learning_rate_schedule=constant",
    )
    found, usual, changed = served_policy(folder, 0.1, seed, *middle, *words), liked(USUAL), liked(CHANGED)
    before, best = best_policy(usual, 0.1), best_policy(changed, 0.1)
    earned, old, most = (float((one * changed).sum(1).mean()) for one in (found, before, best))
    print(f"seed {seed}: {earned:.3f}; the old best earns {old:.3f}, the new one {most:.3f}")
    assert most - old > 0.15
    assert earned - old >= 0.8 * (most - old)


def test_people_who_like_it_choose_the_policy(tmp_path: Path) -> None:
    found, best = served_policy(tmp_path, 0.1, 0, "--total-steps", "150000"), best_policy(liked(USUAL), 0.1)
    assert total_variation(np.full_like(best, 1 / CANDIDATES), best).mean() > 0.4
    assert total_variation(found, best).mean() <= CLOSE


@pytest.mark.slow
def test_a_change_of_taste_is_followed(tmp_path: Path) -> None:
    follows(tmp_path, 0, 1150, "--total-steps", "150000")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_taste_that_changes_is_followed(tmp_path: Path, seed: int) -> None:
    follows(tmp_path, seed, 2300)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_every_weight_is_learned_from_every_seed(tmp_path: Path, beta: float, seed: int) -> None:
    found, best = served_policy(tmp_path, beta, seed), best_policy(liked(USUAL), beta)
    apart = total_variation(found, best)
    earned = {
        name: float((policy * liked(USUAL)).sum(1).mean())
        for name, policy in (("found", found), ("best", best), ("even", np.full_like(best, 1 / CANDIDATES)))
    }
    print(f"beta {beta} seed {seed}: {apart.mean():.4f} apart, at most {apart.max():.4f}; {earned}")
    assert apart.mean() <= CLOSE
