"""An update that fails is brought home to its fragments, and is that of the others."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import CloneSection, ImpalaSection, PPOSection, ReinforceSection
from penstock.learner.algorithms.algorithm import Algorithm, Update, contained, culprits
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.ppo import PPO, Impala, Reinforce
from penstock.learner.batch import Batch, assemble
from tests.support.experience.experience import Collector, Fragment, cartpoles, same, small_policy

COUNT = 6
MAKERS: dict[str, Callable[[], Algorithm]] = {
    "ppo": lambda: PPO(small_policy(), PPOSection(), seed=0),
    "impala": lambda: Impala(small_policy(), ImpalaSection(), seed=0),
    "reinforce": lambda: Reinforce(small_policy(), ReinforceSection(), seed=0),
    "clone": lambda: Clone(small_policy(), CloneSection(value_coefficient=0.5), seed=0),
}


def fragments() -> list[Fragment]:
    """Six, of two slots each."""
    return [Collector(cartpoles(2), session).fragment(small_policy(), 8) for session in range(1, COUNT + 1)]


def batch_of(parts: list[Fragment], without: Collection[int] = ()) -> Batch:
    """As log entries 1, 2, …, but for some."""
    numbered = [(number, part) for number, part in enumerate(parts, 1) if number not in without]
    places = [(number, 100) for number, _ in numbered]
    return assemble([part for _, part in numbered], torch.device("cpu"), places)


def spoiled(parts: list[Fragment], number: int, name: str, value: float) -> None:
    """Write a value into one place of a fragment."""
    header, arrays = parts[number - 1]
    array = arrays[name].copy()
    array[1, 0] = value
    parts[number - 1] = (header, arrays | {name: array})


@pytest.mark.promise("update-fails-exception-number")
@pytest.mark.parametrize("name", MAKERS)
def test_the_rest_is_trained_as_if_the_culprits_had_not_come(name: str) -> None:
    parts, algorithm, other = fragments(), MAKERS[name](), MAKERS[name]()
    for number in (2, 5):
        spoiled(parts, number, "observation" if name == "clone" else "reward", np.inf)
    update = algorithm.update(batch_of(parts), progress=0.0)
    assert update.applied
    assert update.culprits == {2: "nan", 5: "nan"}
    assert update.left_out == 2 * 8 * 2
    assert other.update(batch_of(parts, without=(2, 5)), progress=0.0).steps == update.steps
    assert same(algorithm.state(), other.state())


@pytest.mark.parametrize("value", [-60.0, -1e30, 60.0, 1e30])
def test_an_action_that_no_such_policy_takes_is_implausible(value: float) -> None:
    parts, ppo = fragments(), MAKERS["ppo"]()
    spoiled(parts, 3, "log_prob", value)
    update = ppo.update(batch_of(parts), progress=0.0)
    assert update.culprits == {3: "implausible"}
    assert update.applied


@pytest.mark.promise("metrics-overflow-metric-decides")
@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
@pytest.mark.parametrize("value", [-46.0, -100.0, -1e6])
def test_a_log_ratio_that_is_let_pass_overflows_no_metric(name: str, value: float) -> None:
    sections: dict[str, Any] = {"ppo": PPOSection, "impala": ImpalaSection, "reinforce": ReinforceSection}
    makers: dict[str, Any] = {"ppo": PPO, "impala": Impala, "reinforce": Reinforce}
    algorithm = makers[name](small_policy(), sections[name](max_log_ratio=1e9), seed=0)
    parts = fragments()
    spoiled(parts, 3, "log_prob", value)
    update = algorithm.update(batch_of(parts), progress=0.0)
    assert (update.applied, update.culprits) == (True, {})
    assert {"effective_sample_size", "max_ratio", "kl_behaviour"} <= update.metrics.keys()
    assert np.isfinite(list(update.metrics.values())).all()


@pytest.mark.parametrize("value", [-1.0, 2.0, 1e12])
@pytest.mark.parametrize("activation", ["tanh", "silu"])
@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce", "clone"])
def test_an_action_that_is_no_choice_is_an_error(name: str, activation: str, value: float) -> None:
    makers: dict[str, Any] = {
        "ppo": lambda policy: PPO(policy, PPOSection(), seed=0),
        "impala": lambda policy: Impala(policy, ImpalaSection(), seed=0),
        "reinforce": lambda policy: Reinforce(policy, ReinforceSection(), seed=0),
        "clone": lambda policy: Clone(policy, CloneSection(), seed=0),
    }
    parts = fragments()
    spoiled(parts, 3, "action", value)
    update = makers[name](small_policy(activation=activation)).update(batch_of(parts), progress=0.0)
    assert (update.applied, update.culprits) == (True, {3: "error"})


def attempt_on(refuse: Callable[[set[int]], Exception | str]) -> Callable[..., Update]:
    """An update that fails with an exception or a reason, by the entries in its batch; notes nothing."""

    def attempt(batch: Batch, *, is_rehearsal: bool) -> Update:
        del is_rehearsal
        outcome = refuse({source.number for source in batch.sources})
        if isinstance(outcome, Exception):
            raise outcome
        return Update(
            applied=not outcome, reason=outcome, steps=len(batch.slots), gradient_steps=1, metrics={}
        )

    return attempt


@pytest.mark.promise("update-fails-exception-number")
def test_an_exception_is_brought_home_too() -> None:
    attempt = attempt_on(lambda numbers: IndexError("2 is out of bounds") if 4 in numbers else "")
    update = contained(attempt, batch_of(fragments()))
    assert (update.applied, update.culprits, update.steps) == (True, {4: "error"}, 10)


@pytest.mark.promise("failure-single-fragment-causes")
@pytest.mark.parametrize("most", [0, 3])
def test_an_exception_that_no_fragment_causes_is_raised(most: int) -> None:
    attempt = attempt_on(lambda numbers: RuntimeError("a bug") if len(numbers) > most else "")
    with pytest.raises(RuntimeError, match="a bug"):
        contained(attempt, batch_of(fragments()))


def test_too_little_memory_is_no_fragments_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        contained(attempt_on(lambda _: torch.OutOfMemoryError("no memory")), batch_of(fragments()))


@pytest.mark.promise("failure-single-fragment-causes")
def test_fragments_that_fail_only_together_have_no_culprit() -> None:
    attempt = attempt_on(lambda numbers: "nan" if {1, 6} <= numbers else "")
    update = contained(attempt, batch_of(fragments()))
    assert (update.applied, update.reason, update.culprits) == (False, "nan", {})


def test_few_culprits_among_many_cost_few_trials() -> None:
    trials = 0

    def trial(part: Any) -> str:
        nonlocal trials
        trials += 1
        return "nan" if {100, 900} & set(part) else ""

    assert culprits(trial, range(1024)) == {100: "nan", 900: "nan"}
    assert trials <= 2 * 2 * 11
