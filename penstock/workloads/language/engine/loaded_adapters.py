"""One base model in memory, and beside it the adapter of each version that answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from penstock.config.settings import ConfigurationError
from penstock.policy.weights import decode
from penstock.protocol.specification import Probe
from penstock.workloads.language.policy.language_policy import LanguagePolicy

_OWN: Final = "default"
"""The adapter that the policy was made with; no request is answered with it."""


class LoadedAdapters:
    """Used by one thread at a time. Owns the policy's network from now on."""

    def __init__(self, policy: LanguagePolicy) -> None:
        """Raises ConfigurationError for a policy without an adapter."""
        if not policy.section.lora:
            raise ConfigurationError(
                "policy.kwargs.lora=false: versions share one base model by their adapters; hold whole "
                "networks instead"
            )
        self._policy = policy
        self._network: Any = policy.network
        self._shapes = {name: tensor.shape for name, tensor in policy.state_dict().items()}
        (self._config,) = self._network.peft_config.values()
        self._versions: set[int] = set()

    @property
    def versions(self) -> list[int]:
        """Those that are loaded, ascending; version 0, the base model, always answers."""
        return sorted(self._versions)

    def load(self, version: int, blob: bytes) -> None:
        """Hold the adapter of a version, as `weights.encode` wrote it; one that is held stays.

        Raises ValueError that names the tensor for weights of another policy; nothing is held then.
        """
        if version < 1:
            raise ValueError(f"version={version}: versions are numbered from 1")
        if version in self._versions:
            return
        arrays = decode(blob)
        self._check(arrays)
        name = _name(version)
        with torch.random.fork_rng(devices=()):
            self._network.add_adapter(name, self._config)
        with torch.no_grad():
            for path, parameter in self._network.named_parameters():
                if f".{name}." in path:
                    parameter.copy_(torch.from_numpy(arrays[path.replace(f".{name}.", ".")].copy()))
        self._network.eval()
        self._versions.add(version)

    def drop(self, version: int) -> None:
        """Let go of a version; one that is not held is no error."""
        if version in self._versions:
            self._versions.discard(version)
            self._network.set_adapter(_OWN)
            self._network.delete_adapter(_name(version))

    @contextmanager
    def using(self, version: int) -> Iterator[Any]:
        """The network under a version. Raises ValueError for one that is not held."""
        if version == 0:
            with self._network.disable_adapter():
                yield self._network
            return
        if version not in self._versions:
            raise ValueError(f"version={version}: is not loaded; loaded are {self.versions}")
        self._network.set_adapter(_name(version))
        yield self._network

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """Joint log-probability of each of the probe's rows under a version.

        Raises ValueError for one that is not held.
        """
        with self.using(version):
            return tuple(self._policy.acting_log_prob(probe.observation, probe.action).tolist())

    def _check(self, arrays: Any) -> None:
        if arrays.keys() != self._shapes.keys():
            raise ValueError(f"weights: {sorted(arrays.keys() ^ self._shapes.keys())[:8]} on one side only")
        for name, shape in self._shapes.items():
            if tuple(arrays[name].shape) != tuple(shape):
                raise ValueError(f"weights.{name}: {tuple(arrays[name].shape)} for {tuple(shape)}")


def _name(version: int) -> str:
    return f"version{version}"
