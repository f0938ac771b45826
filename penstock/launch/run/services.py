"""Which services a run has, with the command lines that anybody could type."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.config.settings import ENVIRONMENT_PREFIX, Settings
from penstock.config.trusted import places_of
from penstock.config.workload import Services, find, load
from penstock.launch.run.plan import Plan
from penstock.launch.run.supervisor import CleanExit, DrainStage, ServiceSpec, penstock
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.registry.weight_files import registry_url
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.lifecycle import LIFELINE_VARIABLE, leave

_MAX_SOCKET_FOLDER: Final = 80
_FOLDER_PREFIX: Final = "penstock-"
_OWNER_FILE: Final = "launcher.pid"


def service_specs(plan: Plan, sockets: Path) -> list[ServiceSpec]:
    """The services of a run, in the order in which a fragment needs them."""
    own_redis = not plan.settings.broker.redis
    redis_url = plan.settings.broker.redis or f"unix://{sockets / 'redis.sock'}"
    broker = f"unix:{sockets / 'broker.sock'}"
    config = ("--config", str(plan.service_config))
    files = ("--socket", str(sockets / "redis.sock"), "--dir", str(plan.run_dir / "redis"))
    redis = ServiceSpec(
        name="redis", role="redis", command=penstock("redis", *files, *config), stage=DrainStage.REDIS
    )
    learner = ("learner", "--redis", redis_url, "--run-dir", str(plan.run_dir), *config)
    registry = ("--set", f"registry.url={registry_url(plan.run_dir, plan.settings.registry.url)}")
    resumption = plan.resumption
    workload = find(plan.settings.workload)
    beside = load(workload.services)(plan.settings, sockets) if workload.services else Services()
    # As JSON: a text that looks like a number stays a text.
    places = {**places_of(plan.settings), **beside.places}
    placing = [("--set", f"actor.places.{key}={json.dumps(place)}") for key, place in places.items()]
    acting = (*config, *(word for pair in placing for word in pair))
    actors = [
        _actor(f"actor-{index}", "rollout", broker, acting) for index in range(plan.settings.actor.count)
    ]
    return [
        *([redis] if own_redis else []),
        ServiceSpec(
            name="broker",
            role="broker",
            command=penstock("broker", "--redis", redis_url, "--listen", broker, *config, *registry),
            stage=DrainStage.BROKER,
        ),
        ServiceSpec(
            name="learner",
            role="learner",
            command=penstock(*learner, *resumption.words(over=ResumeOptions())),
            on_restart=resumption.after_a_crash().words(over=resumption),
            clean_exit=CleanExit.DONE,
            stage=DrainStage.LEARNER,
        ),
        *[
            ServiceSpec(name=name, role=name, command=penstock(*command, *config))
            for name, command in beside.commands.items()
        ],
        *actors,
        *([_server(plan, broker, config)] if plan.settings.serving.listen else []),
        *([_actor("evaluator", "evaluation", broker, acting)] if plan.settings.evaluation.episodes else []),
    ]


def _actor(name: str, role: str, broker: str, config: tuple[str, ...]) -> ServiceSpec:
    command = penstock("actor", "--broker", broker, "--actor-id", name, "--role", role, *config)
    return ServiceSpec(
        name=name,
        role="actor" if role == "rollout" else "evaluator",
        command=command,
        clean_exit=CleanExit.STOPPED,
        stage=DrainStage.ACTING,
    )


def _server(plan: Plan, broker: str, config: tuple[str, ...]) -> ServiceSpec:
    # What the run names has been named, or trusted, where it was planned.
    where = ("--run", str(plan.run_dir), "--trust", "--listen", plan.settings.serving.listen)
    command = penstock("serve", "--broker", broker, "--actor-id", "server", *where, *config)
    return ServiceSpec(name="server", role="server", command=command, clean_exit=CleanExit.STOPPED)


def service_environment(settings: Settings) -> dict[str, str]:
    """Return environment variables with settings that the run's file cannot hold.

    Each service has its metrics on a free port of loopback, since all share this machine and the launcher
    looks at their health; the configured port is the launcher's own. No file holds the password.
    """
    values = {"METRICS__HOST": "127.0.0.1", "METRICS__PORT": "0"}
    password = settings.security.redis_password
    if password is not None:
        values["SECURITY__REDIS_PASSWORD"] = json.dumps(password.get_secret_value(), ensure_ascii=False)
    return {ENVIRONMENT_PREFIX + name: value for name, value in values.items()}


def private_folder() -> Path:
    """Return a new folder, mode 0700, its path short enough for sockets; remove those of dead launchers."""
    base = Path(tempfile.gettempdir())
    base = base if len(str(base)) < _MAX_SOCKET_FOLDER else Path("/tmp")  # noqa: S108 - mkdtemp is private
    for file in base.glob(f"{_FOLDER_PREFIX}*/{_OWNER_FILE}"):
        with suppress(FileNotFoundError):  # another launcher was quicker
            if file.stat().st_uid == os.getuid() and not Path(f"/proc/{file.read_text()}").exists():
                shutil.rmtree(file.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=base))
    (folder / _OWNER_FILE).write_text(str(os.getpid()))
    return folder


# ---- The other ranks of a learner on this machine: `learner.ranks` = N is N processes, this one included.

_END_S: Final = 10.0

log = logging.getLogger(__name__)


@contextmanager
def beside(settings: Settings) -> Iterator[None]:
    """Run ranks 1 to `learner.ranks` − 1 inside the block, in which this process is rank 0.

    A process that is a rank already starts none. Raises ConfigurationError, before any is started, for
    settings that several ranks do not support.
    """
    from penstock.learner.algorithms.registry import check_hardware

    count = settings.learner.ranks
    if count == 1 or "RANK" in os.environ:
        yield
        return
    check_hardware(settings, count)
    with _store() as port:
        os.environ |= _environment(port, 0, count)
        others = _Others(count, port)
        try:
            yield
        finally:
            others.end()


@contextmanager
def _store() -> Iterator[int]:
    """Yield the port of a store of torch.distributed that only this machine can reach."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, by its documentation

    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    try:
        yield port
    finally:
        del store


def _environment(port: int, rank: int, count: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


class _Others:
    def __init__(self, count: int, port: int) -> None:
        self._ending = threading.Event()
        # The write end stays open in this process alone: the others drain when the kernel closes it.
        read_fd, self._lifeline = os.pipe()
        self._threads = []
        for rank in range(1, count):
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_environment(port, rank, count), LIFELINE_VARIABLE: str(read_fd)},
                pass_fds=(read_fd,),
            )
            log.info("started", extra={"rank": rank, "pid": process.pid})
            thread = threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        os.close(read_fd)

    def end(self) -> None:
        """Wait for the ranks to end: closing the lifeline ends those that are still running."""
        self._ending.set()
        os.close(self._lifeline)
        for thread in self._threads:
            thread.join(_END_S)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if code != EXIT_OK and not self._ending.is_set():
            sys.stderr.write(
                f"rank {rank} of this learner ended ({code}): no update can be made without it\n"
            )
            leave(EXIT_FAILED)
