"""Policies that a log is asked about, as the probabilities of their actions.

Named `uniform`, `always:NAME`, or by the folder of a run; a Q-network has its ε-greedy choice.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.config.configuration_error import ConfigurationError
from penstock.protocol.spaces import Box, Discrete
from penstock.workloads.goals.traces.answers import Encoding

_ALWAYS: Final = "always:"


Chances = Callable[[NDArray[np.float32]], NDArray[np.float64]]
"""(what is seen, float32 [n, width]) → probability of every action, float64 [n, actions]."""


def fixed(of_actions: NDArray[np.float64]) -> Chances:
    """Return the same probabilities whatever is seen."""
    return lambda seen: np.tile(of_actions, (len(seen), 1))


def learned(policy: Any, *, deterministic: bool) -> Chances:
    """Return the probabilities of a run's policy. deterministic: its most likely action has all."""

    def chances(seen: NDArray[np.float32]) -> NDArray[np.float64]:
        step = policy.step({"observation": seen})
        told = policy.distribution(step.parameters)["action/probability"].astype(np.float64)
        if deterministic:
            told = np.eye(told.shape[1])[told.argmax(1)]
        probabilities: NDArray[np.float64] = told / told.sum(1, keepdims=True)
        return probabilities

    return chances


def read_policy(
    named: str, encoding: Encoding, local: Any, *, deterministic: bool
) -> tuple[Chances, Encoding]:
    """Return the policy of a name, and the encoding that it reads. local: this process's `actor`."""
    if named == "uniform":
        count = len(encoding.actions)
        return fixed(np.full(count, 1 / count)), encoding
    if named.startswith(_ALWAYS):
        try:
            chosen = encoding.action(named.removeprefix(_ALWAYS))
        except ValueError as error:
            raise ConfigurationError(f"--policy {named}: {error}") from error
        return fixed(np.eye(len(encoding.actions))[chosen]), encoding
    return _of_run(Path(named), encoding, local, deterministic=deterministic)


def learned_policy(run: Path, local: Any) -> tuple[Any, Any]:
    """Return specification and final policy of a run that has ended. local: this process's `actor`."""
    # They load torch, which the other policies do without.
    from penstock.policy.weights import load_into  # noqa: PLC0415
    from penstock.workloads.plugin.acting import policy_maker  # noqa: PLC0415
    from penstock.workloads.plugin.serving import read_final  # noqa: PLC0415

    try:
        final = read_final(run)
    except ValueError as error:
        raise ConfigurationError(
            f"--policy {run}: {error}; name `uniform`, `always:NAME` or the folder of a run that has ended"
        ) from error
    policy = policy_maker(final.specification, local)()
    load_into(policy, final.blob)
    return final.specification, policy


def _of_run(run: Path, log: Encoding, local: Any, *, deterministic: bool) -> tuple[Chances, Encoding]:
    specification, policy = learned_policy(run, local)
    kwargs = json.loads(specification.environment_json).get("kwargs", {})
    encoding = Encoding(tuple(kwargs.get("numbers", log.numbers)), tuple(kwargs.get("actions", log.actions)))
    _check_spaces(run, specification, encoding, log)
    return learned(policy, deterministic=deterministic), encoding


def _check_spaces(run: Path, specification: Any, encoding: Encoding, log: Encoding) -> None:
    seen, done = specification.observation_space, specification.action_space
    fits = (
        isinstance(seen, Box)
        and seen.shape == (encoding.width,)
        and isinstance(done, Discrete)
        and done.n == len(encoding.actions)
    )
    lacks = sorted(set(encoding.numbers) - set(log.numbers)) + sorted(
        set(log.actions) - set(encoding.actions)
    )
    if not fits or lacks:
        raise ConfigurationError(
            f"--policy {run}: was trained on observations {seen} and actions {done}; the log has numbers "
            f"{', '.join(log.numbers)} and actions {', '.join(log.actions)}"
            + (f"; they differ in {', '.join(lacks)}" if lacks else "")
        )
