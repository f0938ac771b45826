"""What a recording says of a policy: experience of actors and of a policy server's clients alike.

An episode may lie in several fragments; it is put together by session, slot and number. Left out are episodes
that are not whole and those with a step whose probability is not known, which a recording marks as not valid.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.spaces import Box, Discrete
from penstock.workloads.goals.off_policy.decisions import Decisions
from penstock.workloads.goals.off_policy.outcome_model import cross_fitted, returns_from
from penstock.workloads.goals.traces.judged_policy import Learned, learned_policy
from penstock.workloads.goals.traces.log_evaluation import Question
from penstock.workloads.plugin.recordings import Recording

_Key = tuple[int, int, int]
"""Session, slot and number of an episode."""
_Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class _Episode:
    """steps: rows of it by index. length: of the whole episode, 0 until its end was met."""

    steps: dict[int, int] = field(default_factory=dict)
    length: int = 0
    known: bool = True

    @property
    def is_whole(self) -> bool:
        return self.known and 0 < self.length == len(self.steps)


def ask_recording(folder: Path, run: Path, local: Any, *, discount: float, deterministic: bool) -> Question:
    """Return the decisions of a recording, with what a run's final policy makes of them.

    local: the `actor` section of this process. Rewards are those that the learner was given. Raises
    ConfigurationError for a recording or a run that is none, spaces that differ, and a policy that remembers.
    """
    recording = Recording(folder)
    specification, policy = learned_policy(run, local)
    recording.check_schema(specification.schema.schema_id)
    if policy.memory.is_recurrent or policy.memory.frames.depth > 1:
        raise ConfigurationError(
            f"--policy {run}: remembers, so that single steps do not say what it would do"
        )
    rows, episodes = collected(recording.load(recording.fragments))
    whole = [episode for episode in episodes.values() if episode.is_whole]
    order = np.array([episode.steps[step] for episode in whole for step in range(episode.length)], np.int64)
    episode = np.repeat(np.arange(len(whole)), [one.length for one in whole]).astype(np.int64)
    taken = {name: array[order] for name, array in rows.items()}
    decisions = _decisions(taken, episode, specification, policy, discount, deterministic=deterministic)
    return Question(decisions=decisions, left_out=len(episodes) - len(whole), late=0, late_unmatched=0)


def collected(loaded: Iterable[tuple[Any, _Arrays]]) -> tuple[dict[str, NDArray[Any]], dict[_Key, _Episode]]:
    """Return all steps by tensor name, [n, …], and which of them belong to which episode.

    loaded: fragments as header and arrays, in the order of the recording.
    """
    parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    episodes: defaultdict[_Key, _Episode] = defaultdict(_Episode)
    count = 0
    for header, arrays in loaded:
        steps = header.steps
        for column, slot in enumerate(header.slots):
            for name in _step_names(arrays):
                parts[name].append(arrays[name][:steps, column])
            number, index = slot.episode_id, slot.first_step
            for row in range(steps):
                episode = episodes[header.session, slot.slot_id, number]
                episode.steps[index] = count + row
                episode.known &= bool(arrays["valid"][row, column])
                index += 1
                if arrays["terminated"][row, column] or arrays["truncated"][row, column]:
                    episode.length, number, index = index, number + 1, 0
            count += steps
    return {name: np.concatenate(part) for name, part in parts.items()}, dict(episodes)


def _step_names(arrays: _Arrays) -> list[str]:
    heads = ("observation", "action", "mask")
    return [name for name in arrays if name.partition("/")[0] in heads or name in ("reward", "log_prob")]


def _decisions(
    rows: _Arrays,
    episode: NDArray[np.int64],
    specification: Any,
    policy: Any,
    discount: float,
    *,
    deterministic: bool,
) -> Decisions:
    seen = {name: array for name, array in rows.items() if name.partition("/")[0] in ("observation", "mask")}
    action = {name: array for name, array in rows.items() if name.partition("/")[0] == "action"}
    reward = rows["reward"].astype(np.float64)
    index: NDArray[np.int64] | None = None
    logged = np.minimum(rows["log_prob"].astype(np.float64), 0.0)
    spaces = specification.observation_space, specification.action_space
    if isinstance(spaces[0], Box) and isinstance(spaces[1], Discrete):
        chances = Learned(policy, deterministic).probabilities(rows["observation"])
        index, at = rows["action"].astype(np.int64), np.arange(len(reward))
        flat = rows["observation"].reshape(len(reward), -1).astype(np.float32)
        model = cross_fitted(flat, index, returns_from(episode, reward, discount), episode, chances.shape[1])
        with np.errstate(divide="ignore"):
            target = np.log(chances[at, index])
        predicted, expected = model[at, index], (chances * model).sum(1)
    else:
        if deterministic:
            raise ConfigurationError("--deterministic: only for actions that are one of n")
        target = np.minimum(policy.log_prob(seen, action).astype(np.float64), 0.0)
        predicted = expected = np.zeros(len(reward))
    return Decisions(
        episode=episode,
        reward=reward,
        log_target=target,
        log_logged=logged,
        predicted=predicted,
        expected=expected,
        action=index,
    )
