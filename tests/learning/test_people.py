"""People get what they like: of candidates, of a language model, day by day; what they dislike is withdrawn.

The long forms are real processes. The short form of a language model is one process, with the chance of a
thumb up itself as the reward.
"""

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.client import Arm, PolicyClient, TextClient
from penstock.config.settings import CanarySection, EnvironmentSection, PolicySection
from penstock.policy import weights
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.protocol.specification import RunSpecification
from penstock.registry.canary import Cause, ClientReturn, TrialState, Verdict, observe
from penstock.registry.records import Status
from penstock.workloads.chat.people import CHANGED, LONG, USUAL, draw_prompt, population
from penstock.workloads.chat.tasks import CANDIDATES, liked, questions
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.tokenizer import load_tokenizer
from tests.learning.small_words import Batch, Learned, learned, settings_of
from tests.support.chat.chat_day import Day, play
from tests.support.chat.chat_people import TURNS, Plan
from tests.support.chat.liked_answers import LIKED, OF_OTHERS
from tests.support.chat.opinions import make_people_base
from tests.support.chat.satisfaction import (
    BETA,
    best_policy,
    optimum,
    ppo,
    prepare,
    supervised,
    total_variation,
)
from tests.support.language.text_stand import ServedTextRun, serving_text
from tests.support.run import harness
from tests.support.run.harness import Training, eventually

RECIPE: Final = Path(__file__).resolve().parents[2] / "penstock" / "recipes" / "chat-candidates.toml"
WITHIN_S: Final = 280.0
CLOSE: Final = 0.05


def served_policy(folder: Path, beta: float, seed: int, *words: str) -> NDArray[np.float64]:
    settings = ("--set", f"algorithm.entropy_coefficient={beta}", *words)
    training = Training(folder / "run", str(RECIPE), "--seed", str(seed), *settings)
    training.completed(WITHIN_S)
    seen = np.array([one.features.reshape(-1) for one in questions()], np.float32)
    with (
        harness.server(folder / "server", training.run_dir) as server,
        PolicyClient(server.address) as client,
    ):
        [chances] = client.act_batch(seen, distribution=True).distribution.values()
    return np.asarray(chances, np.float64)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "after", "words"),
    [(0, 1150, ("--total-steps", "150000")), *((seed, 2300, ()) for seed in range(3))],
)
def test_a_taste_that_changes_is_followed(
    tmp_path: Path, seed: int, after: int, words: tuple[str, ...]
) -> None:
    settings = (f"environment.kwargs.changes_after={after}", "algorithm.learning_rate_schedule=constant")
    found = served_policy(tmp_path, 0.1, seed, *words, *(word for one in settings for word in ("--set", one)))
    changed = liked(CHANGED)
    before, best = best_policy(liked(USUAL), 0.1), best_policy(changed, 0.1)
    earned, old, most = (float((one * changed).sum(1).mean()) for one in (found, before, best))
    print(f"seed {seed}: {earned:.3f}; the old best earns {old:.3f}, the new one {most:.3f}")
    assert most - old > 0.15
    assert earned - old >= 0.8 * (most - old)


def test_the_policy_learns_the_candidates_that_people_like(tmp_path: Path) -> None:
    found, best = served_policy(tmp_path, 0.1, 0, "--total-steps", "150000"), best_policy(liked(USUAL), 0.1)
    assert total_variation(np.full_like(best, 1 / CANDIDATES), best).mean() > 0.4
    assert total_variation(found, best).mean() <= CLOSE


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


UPDATES: Final = 24
SHORT_BETA: Final = 0.1
SHORT: Final = {"learning_rate": 2e-3, "critic_learning_rate": 2e-3, "kl_coefficient": SHORT_BETA}
BEGIN: Final = 0.05
"""How far the base may be from the half of thumbs up that the reference has."""


def in_short(base: Path, folder: Path, reward: str, rng: np.random.Generator, seed: int = 0) -> Learned:
    asked = [draw_prompt(rng) for _ in range(256)]
    return learned(settings_of(base, folder, seed, asked, reward, **SHORT), UPDATES)


def satisfaction(batches: list[Batch]) -> float:
    return (1 + float(np.mean([one.reward for one in batches]))) / 2


def test_satisfaction_rises_in_a_short_run(tmp_path: Path) -> None:
    base = make_people_base(tmp_path / "base")
    batches, others = (
        in_short(base, tmp_path, reward, np.random.default_rng(0)).batches for reward in (LIKED, OF_OTHERS)
    )
    print([round(satisfaction([one]), 3) for one in batches], batches[-1].kl, satisfaction(others[-3:]))
    best, kl = optimum(SHORT_BETA)
    assert abs(satisfaction(batches[:2]) - 0.5) <= 0.1
    assert satisfaction(batches[-3:]) >= 0.65
    assert batches[-1].kl <= 1.5 * kl
    assert satisfaction(batches[-3:]) <= best
    assert abs(satisfaction(others[-3:]) - 0.5) <= 0.1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_policies_trained_from_ratings_satisfy_people(tmp_path: Path, seed: int) -> None:
    stage = prepare(tmp_path / "stage", seed)
    began, found = supervised(stage), ppo(stage)
    print(f"{began}\n{found}")
    assert abs(began.satisfaction - optimum(1e6)[0]) <= BEGIN
    best, kl = optimum(BETA)
    assert found.satisfaction >= 0.75
    assert found.kl <= 1.5 * kl
    assert 2 * found.satisfaction - 1 - BETA * found.kl <= 2 * best - 1 - BETA * kl + 0.05
    assert 2 <= found.words <= LONG[1]
    assert found.ended >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_ratings_of_other_answers_teach_nothing(tmp_path: Path, seed: int) -> None:
    found = ppo(prepare(tmp_path / "stage", seed, is_mixed_up=True))
    print(found)
    assert found.satisfaction <= optimum(1e6)[0] + 2 * BEGIN


PARTS: Final = 10


def check_day(day: Day, conversations: int) -> None:
    assert len(day.liked) == TURNS * conversations
    assert day.summary["ledger"]["balanced"]
    assert abs(day.chances(2 * PARTS)[0] - optimum(1e6)[0]) <= 0.1
    assert day.chances(PARTS)[-1] <= optimum(SHORT_BETA)[0] + 0.03


@pytest.mark.slow
def test_satisfaction_rises_within_four_hundred_conversations(tmp_path: Path) -> None:
    day = play(tmp_path, Plan(conversations=400, at_once=8, seed=0))
    thirds = day.chances(3)
    print([round(one, 3) for one in thirds])
    check_day(day, 400)
    assert thirds[2] - thirds[0] >= 0.08


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_people_are_satisfied_in_the_end(tmp_path: Path, seed: int) -> None:
    day = play(tmp_path, Plan(conversations=3000, at_once=8, seed=seed))
    print(f"seed {seed}: {[round(one, 3) for one in day.chances(PARTS)]}, {day.summary['updates']} updates")
    check_day(day, 3000)
    assert day.chances(PARTS)[-1] >= 0.9 * optimum(SHORT_BETA)[0]


@dataclass(frozen=True)
class LikedRun(ServedTextRun):
    def specification(self) -> RunSpecification:
        tokens = Discrete(len(load_tokenizer(str(self.base))))
        kwargs = {"model": str(self.base), "rank": 8, "alpha": 16.0}
        environment = EnvironmentSection(id="text", kwargs={"model": str(self.base), "response_tokens": 12})
        return replace(
            super().specification(),
            environment_json=environment.canonical_json(),
            policy_json=PolicySection(kwargs=kwargs).canonical_json(),
            observation_space=tokens,
            action_space=tokens,
            schema=fragment_schema(tokens, tokens),
            probe=make_probe(tokens.n, 0),
        )


def flipped(blob: bytes) -> bytes:
    arrays = weights.decode(blob)
    return weights.encode(
        {name: np.negative(one) if "lora_B" in name else one for name, one in arrays.items()}
    )


SLOW: Final = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2, 3))])
def test_a_flipped_adapter_is_withdrawn_automatically(tmp_path: Path, seed: int) -> None:
    base = make_people_base(tmp_path / "base")
    rng = np.random.default_rng(seed)
    liked = in_short(base, tmp_path, LIKED, rng, seed).weights
    run = LikedRun(tmp_path / "run", base=base)
    run.describe()
    run.keep(1, liked)
    run.promote(1)
    run.keep(2, flipped(liked))
    with (
        serving_text(run, **{"canary.settle_s": 0.05, "canary.slow_ms": 1e6}) as server,
        TextClient(server.address) as client,
    ):
        run.promote(2, canary_share=0.5)
        eventually(lambda: {1, 2} <= {one.version for one in client.describe().versions}, "the canary", 60)
        thumbs: dict[int, list[float]] = {1: [], 2: []}
        people = population(60, seed=seed)
        for number in itertools.count():
            assert len(thumbs[2]) < CanarySection().horizon, {
                key: np.mean(some) for key, some in thumbs.items()
            }
            talk, prompt = client.start_conversation(f"person-{number}"), draw_prompt(rng)
            given = talk.generate([{"role": "user", "content": prompt}])
            text = str(given.answers[0].message["content"])
            up = float(people.thumb(rng, people.somebody(rng), prompt, text))
            thumbs[given.version].append(up)
            talk.end(reward=up)
            if number % 10 == 9 and run.status(2) is Status.ROLLED_BACK:
                break
        print(f"seed {seed}: {[(len(some), np.mean(some)) for some in thumbs.values()]}")
        assert run.status(1) is Status.ACTIVE
        eventually(
            lambda: {client.start_conversation(f"back-{n}").arm for n in range(20)} == {Arm.ACTIVE},
            "everybody back",
            60,
        )


BOUNDS: Final = CanarySection(false_alarm=0.05)
RATED: Final = 0.8
"""Share of the conversations with the active version that are rated."""
AN_ARM: Final = 1300
"""Conversations. With 600 ten points are found in about half of the trials."""


def trial(
    active: float, canary: float, clients: int, seed: int, rated_more: float = 0.0
) -> tuple[TrialState, int]:
    """The first verdict about a canary, or the last state; and after how many conversations.

    active, canary: the chance of a thumb up with each, among all conversations. rated_more: how much more
    often, or less, the canary is rated.
    """
    draw, state = random.Random(seed), TrialState()
    for number in range(clients):
        on_canary = draw.random() < 0.5
        rate = RATED + (rated_more if on_canary else 0.0)
        rated = draw.random() < rate
        up = rated and draw.random() < (canary if on_canary else active) / rate
        seen = ClientReturn(
            client=str(number), level=0, canary=on_canary, part=0.5, value=float(up), rated=float(rated)
        )
        state = observe(state, BOUNDS, seen)
        if state.verdict in (Verdict.WITHDRAW, Verdict.BETTER):
            return state, number + 1
    return state, clients


def false_share(trials: int, clients: int, share: float = 0.5) -> float:
    found = [trial(share, share, clients, seed)[0] for seed in range(trials)]
    return sum(one.verdict in (Verdict.WITHDRAW, Verdict.BETTER) for one in found) / trials


def found_share(active: float, canary: float, cause: Cause, trials: int) -> tuple[float, int]:
    ended = [trial(active, canary, 2 * AN_ARM, 10_000 + seed) for seed in range(trials)]
    took = sorted(count for state, count in ended if state.cause is cause)
    within = took[int(0.8 * trials) - 1] if len(took) >= 0.8 * trials else -1
    return len(took) / trials, within


def test_thumbs_that_are_alike_are_seldom_distinguished() -> None:
    assert false_share(60, 300) <= BOUNDS.false_alarm + 2.33 * (0.05 * 0.95 / 60) ** 0.5


def test_a_loss_of_ten_points_is_found() -> None:
    share, within = found_share(0.6, 0.5, Cause.LOWER_RETURN, 20)
    print(f"withdrawn: {share:.2f}; 80 % after {within} conversations of both arms")
    assert share >= 0.8


def test_a_canary_whose_people_only_speak_more_is_not_promoted() -> None:
    found = [trial(0.48, 0.6, 2 * AN_ARM, 20_000 + seed, 0.2)[0] for seed in range(20)]
    assert sum(one.verdict is Verdict.BETTER for one in found) <= 2
    assert sum(one.rates_differ for one in found) >= 18


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_trials_of_equal_versions_stay_within_the_error_bound() -> None:
    share = false_share(1000, 600)
    print(f"false verdicts: {share:.3f} of 1,000; the bound is {BOUNDS.false_alarm}")
    assert share <= BOUNDS.false_alarm


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("active", "canary", "cause"), [(0.5, 0.6, Cause.HIGHER_RETURN), (0.6, 0.5, Cause.LOWER_RETURN)]
)
def test_a_change_of_ten_points_is_found_in_both_directions(
    active: float, canary: float, cause: Cause
) -> None:
    share, within = found_share(active, canary, cause, 200)
    print(f"{active} to {canary}: found {share:.3f}; 80 % after {within} conversations of both arms")
    assert share >= 0.8
