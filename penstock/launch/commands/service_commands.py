"""The commands of services in the foreground, which `penstock train` and the manifests start."""

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.runtime.foreground import (
    Assignments,
    EndpointFile,
    Foreground,
    Listen,
    SecuredForeground,
    Trust,
)

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle


RedisUrl = Annotated[str, typer.Option("--redis", metavar="URL", help="redis://, rediss:// or unix:// URL.")]
SERVING_EXPERIMENTS: Final = "-event_engine_listener"
"""gRPC's older listener: the thread that polls a connection also reads it, without waking another one."""
EVALUATOR_NICENESS: Final = 4
"""Niceness of an evaluator while it starts; not while it measures, because a run may wait for it to end."""

LEARNING_NICENESS: Final = 10
"""Learner and rollout workers give way to a policy server beside them.

On two cores that much else wanted, the 99th percentile of an answer was 97 ms without it, 48 ms with 5 and
12 ms with 10.
"""


def _id(name: str | None) -> str | None:
    """Return the name of an actor; raises typer.BadParameter for an invalid id."""
    from penstock.protocol.limits import check_id

    try:
        return None if name is None else check_id("actor_id", name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def redis(
    socket: Annotated[Path, typer.Option(help="Unix socket to listen on.")],
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the append-only file.")],
    foreground: Foreground,
) -> None:
    """Serve a private, durable redis-server on a unix socket."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.launch.run.redis_service import main

        return main(lifecycle, settings, path=socket.absolute(), folder=folder.absolute())

    foreground.run("redis", body)


def broker(
    redis_url: RedisUrl,
    listen: Listen = "127.0.0.1:50051",
    *,
    foreground: SecuredForeground,
) -> None:
    """Serve actors: the gRPC front of a run's Redis."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.broker.service.process import main

        return main(lifecycle, settings, redis_url=redis_url, listen=listen)

    foreground.run("broker", body)


def actor(
    broker_address: Annotated[
        str, typer.Option("--broker", metavar="ADDRESS", help="HOST:PORT or unix:/path.")
    ],
    actor_id: Annotated[
        str | None,
        typer.Option(help="Name of this actor, constant over restarts; default: host and pid.", callback=_id),
    ] = None,
    role: Annotated[
        Literal["rollout", "evaluation"], typer.Option(help="What its steps are for.")
    ] = "rollout",
    *,
    foreground: SecuredForeground,
) -> None:
    """Act: step environments with the newest weights, or with --role evaluation only measure."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        if role == "evaluation":
            from penstock.runtime.lifecycle import giving_way

            giving_way(partial(import_module, "penstock.actor.process"), EVALUATOR_NICENESS)
        _let_clients_go_first(settings)
        from penstock.actor.process import main
        from penstock.protocol.messages import Role

        kind = Role[role.upper()]
        return main(lifecycle, broker=broker_address, actor_id=actor_id, role=kind, settings=settings)

    foreground.run("actor" if role == "rollout" else "evaluator", body)


def serve(
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run whose versions are served.")
    ] = None,
    broker_address: Annotated[
        str | None,
        typer.Option("--broker", metavar="ADDRESS", help="Follow a run in progress, and learn from clients."),
    ] = None,
    listen: Listen = "127.0.0.1:50052",
    actor_id: Annotated[
        str | None,
        typer.Option(help="Name of this server at the broker; default: host and pid.", callback=_id),
    ] = None,
    trust: Trust = False,
    *,
    foreground: SecuredForeground,
) -> None:
    """Answer clients with actions: the versions in a run's folder, a run in progress, or both."""
    # gRPC reads it at its import.
    os.environ.setdefault("GRPC_EXPERIMENTS", SERVING_EXPERIMENTS)

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.actor.serving.server_process import Source, main

        source = Source(run_dir=folder, broker=broker_address, actor_id=actor_id)
        return main(lifecycle, settings, source=source, listen=listen)

    folder = None if run_dir is None else run_dir.absolute()
    foreground.run("server", body, run_dir=folder, trust=trust)


def learner(
    options: ResumeOptions,
    redis_url: RedisUrl,
    run_dir: Annotated[Path, typer.Option(help="Folder of checkpoints, curve and final policy.")],
    config: Annotated[Path, typer.Option(help="Configuration file (TOML).")],
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="When the run is done stay until asked to end, where whatever ends is restarted."
        ),
    ] = False,
    assignments: Assignments = None,
    endpoints: EndpointFile = None,
) -> None:
    """Learn from the log of a run and publish weights; under torchrun as one of several ranks."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        _let_clients_go_first(settings)
        from penstock.config.configuration_error import ConfigurationError
        from penstock.launch.run.services import beside
        from penstock.learner.entry import main
        from penstock.runtime import metrics
        from penstock.runtime.exit import EXIT_OK

        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigurationError(f"--run-dir {run_dir}: is a file; name the folder of a run")
        with beside(settings):
            code = main(lifecycle, settings, redis_url=redis_url, run_dir=run_dir, resumption=options)
        if stay:
            metrics.RUN_FINISHED.set(code == EXIT_OK)
            lifecycle.draining.wait()
        return code

    Foreground(config=config, assignments=assignments, endpoints=endpoints).run("learner", body)


def _let_clients_go_first(settings: "Settings") -> None:
    """Lower the priority below that of the run's policy server, whose clients wait for each answer."""
    if settings.serving.listen:
        from penstock.runtime.lifecycle import give_way

        give_way(LEARNING_NICENESS)
