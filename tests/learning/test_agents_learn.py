"""Agents that know OpenAI's API alone teach a served model what it cannot guess: two tasks, with controls.

Real processes: `penstock train` without rollout workers, `penstock gateway text`, and the agent's script.
"""

import json
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest

from tests.support.language.agents_run import agent, agents_run, gateway
from tests.support.language.tiny_models import make_guesser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WINDOW: Final = 300
CEILING: Final = 0.5
"""What an untold colour earns."""
SOLVED: Final = 0.8
MOST: Final = 12_000
"""Conversations after which it counts as not learned."""
CONTROL: Final = 4_000
"""Conversations of a control: more than learning takes."""
BATCH: Final = 512
"""Tokens of an update, prompts among them: with fewer, noise decides which guess the model settles for."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guesser(tmp_path_factory.mktemp("guesser") / "base")


def best(earned: Iterator[float], enough: float = 1.0) -> tuple[float, float, int]:
    """The first and the highest mean of so many conversations in a row, looked for until it is enough.

    And how many conversations that took.
    """
    window, first, highest, count = deque[float](maxlen=WINDOW), math.nan, 0.0, 0
    for count, one in enumerate(earned, 1):
        assert not math.isnan(one), "a conversation was cut off"
        window.append(one)
        if count == WINDOW:
            first = fmean(window)
        if count >= WINDOW:
            highest = max(highest, fmean(window))
        if highest >= enough:
            break
    return first, highest, count


def reached(task: str, base: Path, folder: Path, socket: Path, *, seed: int, most: int) -> float:
    with (
        agents_run(folder, socket, base, seed=seed, batch_steps=BATCH),
        gateway(socket, folder) as base_url,
        agent(task, base_url, most, seed=seed) as earned,
    ):
        first, highest, count = best(earned, SOLVED)
    print(json.dumps({"task": task, "seed": seed, "first": first, "best": highest, "conversations": count}))
    return highest


@pytest.mark.promise("agents-teach-served-model")
@pytest.mark.parametrize("seed", range(3))
def test_an_agent_learns_the_tool_and_passes_the_ceiling_without_it(
    base: Path, tmp_path: Path, short_folder: Path, seed: int
) -> None:
    found = reached("lookup", base, tmp_path, short_folder / "text.sock", seed=seed, most=MOST)
    assert found >= SOLVED


@pytest.mark.parametrize("seed", range(3))
def test_without_the_tool_the_ceiling_is_not_passed(
    base: Path, tmp_path: Path, short_folder: Path, seed: int
) -> None:
    found = reached("guess", base, tmp_path, short_folder / "text.sock", seed=seed, most=CONTROL)
    assert found < CEILING + 0.15


@pytest.mark.promise("agents-teach-served-model")
@pytest.mark.parametrize("seed", range(3))
def test_a_first_turn_that_pays_in_the_third_is_learned(
    base: Path, tmp_path: Path, short_folder: Path, seed: int
) -> None:
    found = reached("opening", base, tmp_path, short_folder / "text.sock", seed=seed, most=MOST)
    assert found >= SOLVED


@pytest.mark.parametrize("seed", range(3))
def test_with_a_column_for_each_turn_the_first_turn_is_not_learned(
    base: Path, tmp_path: Path, short_folder: Path, seed: int
) -> None:
    found = reached("opening-apart", base, tmp_path, short_folder / "text.sock", seed=seed, most=CONTROL)
    assert found < SOLVED - 0.2
