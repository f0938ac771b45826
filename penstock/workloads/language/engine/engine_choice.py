"""The engine that answers single requests: `transformers`, or an entry point of `penstock.engines`.

What an engine returns as the log-probability of a token is that of the whole distribution at temperature 1
under the version that drew it: the learner corrects what differs from its own, up to
`algorithm.behaviour_weight_cap`.
"""

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.engine.continuous_engine import (
    ContinuousEngine,
    Growing,
    LoadedAdapters,
    LoadedNetworks,
    Request,
)
from penstock.workloads.language.policy.language_policy import LanguagePolicy
from penstock.workloads.plugin.serving import Weights

GROUP: Final = "penstock.engines"
OWN: Final = "transformers"


class TextEngine(Protocol):
    """Thread-safe; one thread calls `run`. Version 0 is the model that training began with."""

    def submit(self, request: Request, on_change: Callable[[Growing], None] = ...) -> Growing:
        """Have a request answered under its version; raises ValueError for one that is not loaded."""

    def load(self, version: int, blob: bytes) -> None:
        """Hold the weights of a version; raises ValueError for those of another policy."""

    def drop(self, version: int) -> bool:
        """Let go of a version; False: it answers somebody, and stays."""

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """Joint log-probability of each of the probe's rows under a version, as it is loaded."""

    @property
    def versions(self) -> list[int]:
        """Those that are loaded, ascending."""

    @property
    def waiting(self) -> int:
        """Answers that wait for room."""

    def run(self, is_over: Callable[[], bool], wait_s: float = ...) -> None:
        """Answer until it is over; then cancel what is left."""


def open_engine(
    name: str, policy: LanguagePolicy, *, eos_id: int, pad_id: int, max_rows: int, seed: int
) -> TextEngine:
    """Return the engine of a name over a policy, whose network it owns from now on.

    max_rows: answers under way. seed: of what it draws. Another package's engine is made by what its entry
    point names, called with the same arguments. Raises ConfigurationError for one that is not installed or
    cannot be loaded.
    """
    own: dict[str, Any] = {"eos_id": eos_id, "pad_id": pad_id, "max_rows": max_rows, "seed": seed}
    if name == OWN:
        loaded = LoadedAdapters(policy) if policy.section.lora else LoadedNetworks(policy)
        return ContinuousEngine(loaded, **own, device=policy.device)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        raise ConfigurationError(
            f"environment.kwargs.engine={name!r}: no installed package offers it (entry points of "
            f"{GROUP!r}); use one of {', '.join(sorted({OWN, *offered}))}"
        )
    try:
        make: Callable[..., TextEngine] = offered[name].load()
    except (ImportError, AttributeError) as error:
        text = f"environment.kwargs.engine={name!r}: {offered[name].value} cannot be loaded: {error}"
        raise ConfigurationError(text) from error
    return make(policy, **own)


# ---- How far an engine's answers to the probe are from those of a plain pass, measured when its server
# starts.

ROOM: Final = 2.0
"""A tolerance that is advised is so many times what was measured: other versions round otherwise."""

log = logging.getLogger(__name__)


class EngineTolerance:
    """Measures one engine.

    name: of the engine. make_policy: the run's policy, another one with each call. most:
    `learner.probe_tolerance`.
    """

    def __init__(self, name: str, make_policy: Callable[[], LanguagePolicy], most: float) -> None:
        self._name, self._make_policy, self._most = name, make_policy, most

    def measure(self, weights: Weights, probe: Probe, given: tuple[float, ...]) -> float:
        """Return the largest |given − r| / (1 + |r|) over the probe's rows, r being the plain pass.

        given: what the engine answers under these weights. Needs memory for one more base model meanwhile.
        Raises RunFailed for an engine that the learner would quarantine, with both numbers.
        """
        policy = self._make_policy()
        policy.load(weights.blob)
        right = policy.log_prob(probe.observation, probe.action).astype(np.float64)
        off = np.abs(np.asarray(given, np.float64) - right) / (1.0 + np.abs(right))
        found = float(off.max()) if off.shape == right.shape and np.isfinite(off).all() else float("inf")
        metrics.ENGINE_PROBE_DIFFERENCE.set(found)
        said = {"engine": self._name, "difference": found, "tolerance": self._most}
        log.info("the engine's answers to the probe were measured", extra=said)
        if not found <= self._most:
            advice = f"Set the tolerance to {ROOM * found:.1g}, or use" if np.isfinite(found) else "Use"
            raise RunFailed(
                f"environment.kwargs.engine={self._name!r}: answers the probe {found:.2g} off what "
                f"transformers answers with the same weights, and learner.probe_tolerance={self._most:g}: "
                f"all that it samples would be quarantined. {advice} another engine"
            )
        return found
