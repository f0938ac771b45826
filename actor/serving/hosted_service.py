"""What a policy server hosts: the calls that answer its clients, and what they need from the process."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from penstock.actor.serving.loaded_versions import Weights
from penstock.rpc.auth import Calls
from penstock.runtime.lifecycle import BackgroundTasks


class HostedService(Protocol):
    """One event loop uses it; `begin` comes first, then calls, `apply`, `cut` and `sweep`, then the end."""

    @property
    def names(self) -> Sequence[str]:
        """Full names of its gRPC services."""

    @property
    def calls(self) -> Calls:
        """Parties that may call them, where the core does not say."""

    @property
    def background_tasks(self) -> BackgroundTasks:
        """Tasks that run beside its calls; an error in one of them ends the process."""

    def add_to(self, server: "grpc.aio.Server") -> None:
        """Serve its calls from `server`."""

    async def begin(self) -> None:
        """Look for versions; raises ConfigurationError where nothing could ever be answered with."""

    async def apply(self, weights: Weights) -> tuple[float, ...]:
        """Answer `latest` with these; returns what the run's probe says under them. Raises Fatal."""

    def cut(self) -> None:
        """Put what is open on its way to the learner."""

    def sweep(self) -> None:
        """Give up what is not heard of any more, and send what has ripened; called all the time."""

    async def finish(self) -> None:
        """No call comes any more: put all that will be learned from into the queue."""

    def close(self) -> None:
        """Let go of threads and files."""
