"""The probe: fixed questions that show which weights an actor really serves. Safe to use from any thread.

The learner keeps the right answer of each version that it published. A session with a wrong answer, or with
that of the version before, is quarantined: the feed books its fragments as `quarantined` until its answers
are right again. A session that sent experience which cannot be trained on is quarantined for good and closed:
its actor goes on in another one.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.broker.log.replies import ProbeAnswer
from penstock.policy.policy import Policy
from penstock.protocol.spaces import Space, leaves, sample
from penstock.protocol.specification import Probe
from penstock.protocol.tensor import Array
from penstock.runtime import metrics

ROWS: Final = 4
_VERSIONS_KEPT: Final = 1024
_CONVICTED_KEPT: Final = 4096
_SUSPICIONS: Final = 3
_ROUNDING: Final = 2e-6
"""An answer r within this times 1 + |r| is right: 16 units in the last place of float32."""
_MUCH_NEARER: Final = 0.1

log = logging.getLogger(__name__)


def make_probe(observation_space: Space, policy: Policy, seed: int) -> Probe:
    """Return the probe of a run: observations drawn within their bounds, and the policy's action for each.

    A policy with state gets that after one step on other observations: zeros would not depend on its weights.
    """
    generator = np.random.default_rng(seed)
    before, observation = (
        {path: sample(leaf, ROWS, generator) for path, leaf in leaves(observation_space, "observation")}
        for _ in range(2)
    )
    if policy.state_space.spaces:
        observation |= policy.act(before | policy.initial_state(ROWS), deterministic=True).state
    else:
        observation = before
    return Probe(observation=observation, action=policy.act(observation, deterministic=True).action)


class Replica(Protocol):
    """Answers the probe with given weights; a `Policy` is one."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return its weights by name, as published; it answers with the values written to these tensors."""
        ...

    def log_prob(self, observation: Mapping[str, Array], action: Mapping[str, Array], /) -> Array:
        """Return the log-probability of each row's action, float32 [rows]."""
        ...


@dataclass(eq=False)
class Quarantine:
    """The right answer of each version, and the sessions that are held.

    replica: a policy of the run that nothing else uses; published weights are loaded into it.
    tolerance: an answer r may be off by this times 1 + |r|.
    """

    probe: Probe
    replica: Replica
    tolerance: float

    def __post_init__(self) -> None:
        self._own = self.replica.state_dict()
        self._lock = threading.Lock()
        self._right: OrderedDict[int, tuple[str, Array]] = OrderedDict()
        self._answered: dict[int, tuple[int, int]] = {}
        """By session: the version of its former answer, and of its last one."""
        self._wrong: frozenset[int] = frozenset()
        """Sessions whose last answer was not right."""
        self._suspected: Counter[int] = Counter()
        self._convicted: OrderedDict[int, None] = OrderedDict()
        """Sessions that sent experience which cannot be trained on."""
        self._unclosed: dict[int, tuple[str, str]] = {}
        """Of these: the actor and why."""
        self._sessions: frozenset[int] = frozenset()

    def expect(self, version: int, sha256: str, weights: Mapping[str, Array]) -> None:
        """Compute and keep the answer of published weights.

        version, sha256: of the publication. weights: by name, in the shape and dtype of the policy's.
        """
        with torch.no_grad():
            for name, own in self._own.items():
                own.copy_(torch.from_numpy(weights[name]))
        answer = self.replica.log_prob(self.probe.observation, self.probe.action)
        with self._lock:
            self._right[version] = (sha256, answer)
            while len(self._right) > _VERSIONS_KEPT:
                self._right.popitem(last=False)

    def check(self, answers: Iterable[ProbeAnswer]) -> None:
        """Judge the newest answers, except of versions that are no longer kept."""
        answers = list(answers)
        self._answered = {answer.session: self._versions(answer) for answer in answers}
        for answer in answers:
            with self._lock:
                right = self._right.get(answer.version)
                former = self._right.get(self._answered[answer.session][0])
            if right is None:
                continue
            wrong = self._difference(answer, *right) or _lateness(answer, right, former)
            held = answer.session in self._wrong
            if wrong and not held:
                metrics.PROBE_MISMATCHES.inc()
                log.error(
                    "session quarantined: it does not serve the weights it names", extra=_who(answer, wrong)
                )
                self._answered_wrong(self._wrong | {answer.session})
            elif held and not wrong:
                log.warning("quarantine lifted", extra=_who(answer, ""))
                self._answered_wrong(self._wrong - {answer.session})

    def suspect(self, session: int, actor_id: str, why: str) -> None:
        """Note experience that made an update fail; the third time convicts the session."""
        self._suspected[session] += 1
        if self._suspected[session] >= _SUSPICIONS:
            self.convict(session, actor_id, why)
        elif len(self._suspected) > _CONVICTED_KEPT:
            self._suspected.clear()

    def convict(self, session: int, actor_id: str, why: str) -> None:
        """Hold a session for good, and have it closed: it sent experience that cannot be trained on."""
        if session in self._convicted:
            return
        metrics.SESSIONS_QUARANTINED.inc()
        words = {"actor": actor_id, "session": session, "why": why}
        log.error("session quarantined for good", extra=words)
        with self._lock:
            self._convicted[session] = None
            self._unclosed[session] = (actor_id, why)
            if len(self._convicted) > _CONVICTED_KEPT:
                self._convicted.popitem(last=False)
            self._sessions = self._wrong.union(self._convicted)

    def close_sessions(self, close: Callable[[int, str, str], None], *, again: bool = False) -> None:
        """Call `close` with number, actor and reason of convicted sessions; again: of closed ones, too."""
        with self._lock:
            if again:
                self._unclosed = (
                    dict.fromkeys(self._convicted, ("", "of what it sent before")) | self._unclosed
                )
            waiting = dict(self._unclosed)
        for session, (actor_id, why) in waiting.items():
            close(session, actor_id, why)
            self._unclosed.pop(session, None)

    def state(self) -> dict[str, Any]:
        """Return the convicted and suspected sessions for a checkpoint; answers will come again."""
        with self._lock:
            convicted = list(self._convicted)
        return {"convicted": convicted, "suspected": [list(one) for one in self._suspected.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._convicted = OrderedDict.fromkeys(state["convicted"])
            self._sessions = self._wrong.union(self._convicted)
        self._suspected = Counter(dict(state["suspected"]))

    def _answered_wrong(self, wrong: frozenset[int]) -> None:
        with self._lock:
            self._wrong = wrong
            self._sessions = wrong.union(self._convicted)

    @property
    def sessions(self) -> frozenset[int]:
        """Return the sessions that are held; a new set for each change."""
        return self._sessions

    def holds(self, session: int) -> bool:
        return session in self._sessions

    def _versions(self, answer: ProbeAnswer) -> tuple[int, int]:
        former, last = self._answered.get(answer.session, (0, 0))
        return (former, last) if answer.version == last else (last, answer.version)

    def _difference(self, answer: ProbeAnswer, sha256: str, right: Array) -> str:
        if answer.sha256 != sha256:
            return f"sha256 {answer.sha256[:12]} instead of {sha256[:12]}"
        given = np.asarray(answer.log_prob, np.float64)
        if given.shape != right.shape:
            return f"{given.size} answers to {right.size} questions"
        # Relative, too: rounding grows with the answer, large for many narrow Gaussians. NaN is wrong.
        if np.isclose(given, right, rtol=self.tolerance, atol=self.tolerance).all():
            return ""
        worst = int(np.argmax(np.abs(given - right.astype(np.float64))))
        return f"{given[worst]:g} instead of {right[worst]:g}, tolerance {self.tolerance:g}"


def _lateness(answer: ProbeAnswer, right: tuple[str, Array], former: tuple[str, Array] | None) -> str:
    """Return why an answer within the tolerance is still that of the version before, or ""."""
    if former is None:
        return ""
    given = np.asarray(answer.log_prob, np.float64)
    off = np.abs(given - right[1].astype(np.float64))
    off_former = np.abs(given - former[1].astype(np.float64))
    if (off <= _ROUNDING * (1 + np.abs(given))).all() or off_former.max() >= _MUCH_NEARER * off.max():
        return ""
    return f"off by {off.max():g}, and by {off_former.max():g} from what the version before answers"


def _who(answer: ProbeAnswer, why: str) -> dict[str, object]:
    return {"actor": answer.actor_id, "session": answer.session, "version": answer.version, "why": why}
