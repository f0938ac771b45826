"""One forward pass answers many requests with one version of the policy.

The objects that are made for every request (`Question`, `Answer`, and `Choice`, `Asked` and `Answered` of
`versions`) and for every pass are never changed, yet not frozen: frozen ones take more than twice as long to
make, 6 µs per answer of a stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.policy.acting.acting_policy import Acted
from penstock.policy.policy import Policy
from penstock.protocol.tensor import Array, all_finite

Reals = NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A version whose weights are in a policy: never changed, only let go of.

    Used by one thread at a time.
    """

    policy: Policy
    version: int
    update: int
    sha256: str
    random: np.random.Generator = field(default_factory=np.random.default_rng)


@dataclass(slots=True, kw_only=True, eq=False)
class Question:
    """A request, read. observation: by name, [rows, *shape]; the policy's state too, where it remembers."""

    observation: Mapping[str, Array]
    rows: int
    deterministic: bool = False
    seed: int | None = None
    masks: Mapping[str, NDArray[np.bool_]] | None = None
    distribution: bool = False
    value: bool = False
    taken: Mapping[str, Array] | None = None
    """How likely are these actions, as drawn, instead of new ones?"""
    episode_id: str = ""
    request_id: str = ""

    @property
    def shares_draw(self) -> bool:
        """Drawn with its neighbours, without wishes of its own."""
        is_own = self.deterministic or self.distribution
        return self.seed is None and self.masks is None and self.taken is None and not is_own


@dataclass(slots=True)
class Pass:
    """One forward pass: its rows, and the seconds that its own version took."""

    rows: int
    seconds: float


@dataclass(slots=True, eq=False)
class Answer:
    """What one forward pass answers.

    action: by name, as drawn, [rows, *shape].
    ready: as the environment takes it; nothing of what was `taken`.
    log_prob, value: float32 [rows].   distribution: by name.
    state: the policy's after this step, by name, [rows, *shape].
    passed: the pass that it comes from; None where it was not timed.
    """

    loaded: Loaded
    action: Mapping[str, Array]
    ready: Mapping[str, Array]
    log_prob: NDArray[np.float32]
    distribution: Mapping[str, Reals] | None = None
    value: NDArray[np.float32] | None = None
    state: Mapping[str, Array] = field(default_factory=dict)
    passed: Pass | None = None


class NotFinite(ArithmeticError):
    """The network answered NaN or infinity to a finite observation."""


def answer(loaded: Loaded, questions: Sequence[Question]) -> Sequence[Answer | NotFinite]:
    """Return an answer per question, in order, of one pass over all their rows.

    A row's answer does not depend on its neighbours beyond rounding.
    """
    policy = loaded.policy
    observation = _together(questions)
    step = policy.step(observation)
    parameters = step.parameters
    values = policy.values(observation) if any(question.value for question in questions) else None
    if all(question.shares_draw for question in questions):
        try:
            return _split(loaded, questions, policy.choose(parameters, loaded.random), values, step.state)
        except FloatingPointError:
            pass  # Somebody's rows: each is answered on its own.
    start, answers = 0, list[Answer | NotFinite]()
    for question in questions:
        rows = slice(start, start + question.rows)
        part = None if values is None or not question.value else values[rows]
        state = {name: array[rows] for name, array in step.state.items()}
        answers.append(_single(loaded, question, parameters[rows], part, state))
        start += question.rows
    return answers


def _together(questions: Sequence[Question]) -> Mapping[str, Array]:
    if len(questions) == 1:
        return questions[0].observation
    names = questions[0].observation
    return {name: np.concatenate([question.observation[name] for question in questions]) for name in names}


def _split(
    loaded: Loaded,
    questions: Sequence[Question],
    acted: Acted,
    values: NDArray[np.float32] | None,
    state: Mapping[str, Array],
) -> Sequence[Answer | NotFinite]:
    log_prob = acted.log_prob
    whole = Answer(loaded, acted.action, ready(loaded.policy, acted), log_prob, None, values, state)
    answers = [whole]
    if len(questions) > 1:
        ends = accumulate([question.rows for question in questions])
        answers = [_part(whole, question, end) for question, end in zip(questions, ends, strict=True)]
    if _is_finite(log_prob) and _is_finite(values):
        return answers
    return [_finite(given) for given in answers]


def _part(whole: Answer, question: Question, end: int) -> Answer:
    """Return what the rows before `end` are to a question."""
    rows = slice(end - question.rows, end)
    action = {name: array[rows] for name, array in whole.action.items()}
    return Answer(
        whole.loaded,
        action,
        action if whole.ready is whole.action else {name: array[rows] for name, array in whole.ready.items()},
        whole.log_prob[rows],
        None,
        whole.value[rows] if whole.value is not None and question.value else None,
        whole.state and {name: array[rows] for name, array in whole.state.items()},
    )


def ready(policy: Policy, acted: Acted) -> Mapping[str, Array]:
    """Return the actions as the environment takes them, by name; `acted.action` where that is as drawn."""
    action = acted.action
    made = {head.path: head.to_environment(action[head.path]) for head in policy.action_heads}
    return action if all(made[name] is array for name, array in action.items()) else made


def _single(
    loaded: Loaded,
    question: Question,
    parameters: Reals,
    value: NDArray[np.float32] | None,
    state: Mapping[str, Array],
) -> Answer | NotFinite:
    policy, action = loaded.policy, question.taken
    as_taken: Mapping[str, Array] = {}
    try:
        if action is None:
            random = loaded.random if question.seed is None else np.random.default_rng(question.seed)
            acted = policy.choose(
                parameters, random, deterministic=question.deterministic, masks=question.masks
            )
            action, as_taken, log_prob = acted.action, ready(policy, acted), acted.log_prob
        else:
            log_prob = policy.chance(parameters, action, question.masks)
    except FloatingPointError as error:
        return NotFinite(f"version {loaded.version}: {error}")
    described = policy.distribution(parameters, question.masks) if question.distribution else None
    return _finite(Answer(loaded, action, as_taken, log_prob, described, value, state))


def _finite(given: Answer) -> Answer | NotFinite:
    """The answer, unless its log-probability or its value is no number."""
    for name, numbers in (("log-probability", given.log_prob), ("value", given.value)):
        if not _is_finite(numbers):
            return NotFinite(f"version {given.loaded.version}: the {name} is not finite")
    return given


def _is_finite(numbers: NDArray[np.float32] | None) -> bool:
    return numbers is None or all_finite(numbers)
