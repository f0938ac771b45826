"""A whole network in memory for each version that answers, where all weights are trained.

Each takes as much memory as the model. Version 0 is the model that training began with.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.config.settings import ConfigurationError
from penstock.protocol.specification import Probe
from penstock.workloads.language.policy.language_policy import LanguagePolicy


class LoadedNetworks:
    """Used by one thread at a time; `LoadedAdapters` is the same for versions that are adapters."""

    def __init__(self, policy: LanguagePolicy) -> None:
        """policy: of version 0, which is never changed.

        Raises ConfigurationError for one with an adapter: its versions are not whole.
        """
        if policy.section.lora:
            raise ConfigurationError("policy.kwargs.lora=true: its versions are adapters, not whole networks")
        self._policies = {0: policy}

    @property
    def versions(self) -> list[int]:
        """Those that are loaded, ascending; version 0 always answers."""
        return sorted(self._policies.keys() - {0})

    def load(self, version: int, blob: bytes) -> None:
        """Hold the weights of a version, as `weights.encode` wrote them; one that is held stays.

        Raises ValueError that names the tensor for weights of another policy; nothing is held then.
        """
        if version < 1:
            raise ValueError(f"version={version}: versions are numbered from 1")
        if version in self._policies:
            return
        made = copy.deepcopy(self._policies[0])
        made.load(blob)
        self._policies[version] = made

    def drop(self, version: int) -> None:
        """Let go of a version; one that is not held is no error, and version 0 stays."""
        if version:
            self._policies.pop(version, None)

    @contextmanager
    def using(self, version: int) -> Iterator[Any]:
        """The network of a version. Raises ValueError for one that is not held."""
        yield self._held(version).network

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """Joint log-probability of each of the probe's rows under a version.

        Raises ValueError for one that is not held.
        """
        return tuple(self._held(version).acting_log_prob(probe.observation, probe.action).tolist())

    def _held(self, version: int) -> LanguagePolicy:
        if version not in self._policies:
            raise ValueError(f"version={version}: is not loaded; loaded are {self.versions}")
        return self._policies[version]
