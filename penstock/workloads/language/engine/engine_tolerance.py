"""How far an engine's answers to the probe are from those of a plain pass, measured when its server starts.

The learner quarantines a server whose answer r to the probe is off by more than `learner.probe_tolerance`
times 1 + |r|. Another engine rounds otherwise, and does so with every version: it is measured once, against
the same weights read by transformers, and one that would be quarantined does not begin to answer.
"""

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.policy.language_policy import LanguagePolicy
from penstock.workloads.plugin.serving import Weights

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
