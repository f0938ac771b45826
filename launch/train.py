"""`penstock train`: one run on one machine, from nothing to the summary.

Starts Redis (unless given one), broker, learner, rollout workers and the evaluation actor, each as
a process of its own, and all at once: each waits for those it needs. Ends when the learner ends, on
Ctrl-C or SIGTERM (everything drains within DRAIN_S, exit 130), or when a service keeps dying (exit
1 with its cause on the last stderr line). The order of a drain is the way of a fragment: actors,
learner, broker, Redis.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from launch.plan import Plan, prepare_folder
from launch.process import Folder, ServiceSpec, penstock
from launch.progress import MetricsTail
from launch.redis_service import ask
from launch.summary import Ending, RedisFacts, learner_account, make_summary, summary_lines, write_summary
from launch.supervisor import Account, GaveUp, Supervisor
from launch.view import View, make_view
from penstock.runtime import logs
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK
from penstock.runtime.health import Endpoint, Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

TICK_S: Final = 0.1
HEALTH_INTERVAL_S: Final = 5.0
DRAIN_S: Final = 15.0
_DRAIN_ORDER: Final = (
    (("actor", "evaluator"), 4.0),
    (("learner",), 11.0),
    (("broker",), 12.5),
    (("redis",), DRAIN_S - 0.5),
)
"""Roles, and by when they shall be gone, in seconds since the drain began."""
_MAX_SOCKET_FOLDER: Final = 80

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How supervising ended: exit code and, when it failed, why."""

    code: int
    cause: str = ""


def train(plan: Plan, *, as_json: bool) -> int:
    """Run it; returns the exit code."""
    started_s = time.monotonic()
    prepare_folder(plan)
    lifecycle = Lifecycle("launcher")
    lifecycle.install()
    stream = sys.stderr if as_json else sys.stdout
    sockets = private_folder()
    with (plan.run_dir / "logs" / "launcher.log").open("a", buffering=1) as log_file:
        logs.configure("launcher", plan.settings.run, stream=log_file)
        try:
            with make_view(stream, plan.settings.run, plan.settings.learner.total_steps, plan.target) as view:
                run = Run(plan, sockets, lifecycle, view)
                outcome = run.go()
        finally:
            shutil.rmtree(sockets, ignore_errors=True)
    ending = Ending(
        wall_seconds=time.monotonic() - started_s,
        interrupted=outcome.code == EXIT_INTERRUPTED,
        cause=outcome.cause,
        accounts=run.accounts(),
        redis=run.redis_facts,
    )
    _conclude(plan, ending, as_json=as_json)
    if outcome.cause:
        sys.stderr.write(f"{outcome.cause}\n")
    return outcome.code


class Run:
    """The processes of one run and the loop that watches them."""

    def __init__(self, plan: Plan, sockets: Path, lifecycle: Lifecycle, view: View) -> None:
        self._plan = plan
        self._sockets = sockets
        self._lifecycle = lifecycle
        self._view = view
        self._health = Health("launcher")
        _server, self._metrics_port = serve_http(self._health, "127.0.0.1", 0)
        # The write end stays open in this process alone: children drain when the kernel closes it.
        read_fd, self._lifeline = os.pipe()
        folder = Folder(logs=plan.run_dir / "logs", endpoints=plan.run_dir / "endpoints")
        self._supervisor = Supervisor(folder, read_fd, view.event)
        self._tail = MetricsTail(plan.run_dir / "metrics.jsonl")
        self._endpoints: dict[str, Endpoint] = {}
        self.redis_facts = RedisFacts(version="", durability=plan.settings.broker.durability)

    def go(self) -> Outcome:
        """Start, watch, drain."""
        (self._plan.run_dir / "learner.json").unlink(missing_ok=True)
        self._lifecycle.on_drain(self._supervisor.wake)
        specs = service_specs(self._plan, self._sockets)
        self._view.event(f"{self._plan.settings.run}: starting {', '.join(spec.name for spec in specs)}")
        self._view.event(f"everything of this run is in {self._plan.run_dir}")
        for spec in specs:
            self._supervisor.start(spec)
        try:
            outcome = self._watch()
        except GaveUp as error:
            outcome = Outcome(code=error.code, cause=str(error))
            self._view.event(f"giving up: {error}")
        self._drain()
        return outcome

    def accounts(self) -> list[Account]:
        """The services' accounts, with Redis under its server's own pid, and the launcher's."""
        return [*map(self._with_server_pid, self._supervisor.accounts()), _own_account()]

    def _watch(self) -> Outcome:
        self._health.set_ready(ready=True)
        is_training = False
        next_health_s = time.monotonic() + HEALTH_INTERVAL_S
        while not self._lifecycle.draining.is_set():
            if self._supervisor.is_done("learner"):
                return self._learner_ended()
            self._note_endpoints()
            progress = self._tail.poll()
            if progress is not None:
                if not is_training:
                    self._view.event("training")
                is_training = True
                self._view.show(progress)
            if time.monotonic() >= next_health_s:
                next_health_s = time.monotonic() + HEALTH_INTERVAL_S
                self._supervisor.check_health()
            self._supervisor.step(TICK_S)
        return Outcome(code=EXIT_INTERRUPTED)

    def _learner_ended(self) -> Outcome:
        """Target reached or steps done: 0. Asked to end by an operator or a signal of its own: interrupted."""
        if learner_account(self._plan.run_dir).get("finished"):
            return Outcome(code=EXIT_OK)
        self._view.event("the learner was asked to end; `penstock train --resume` goes on from here")
        return Outcome(code=EXIT_INTERRUPTED)

    def _drain(self) -> None:
        """Actors, learner, broker, Redis: within DRAIN_S, then the hard way."""
        self._note_endpoints()
        supervisor = self._supervisor
        if self._lifecycle.draining.is_set():
            self._view.event("draining: actors, learner (last checkpoint), broker, redis")
        began_s = time.monotonic()
        late: list[str] = []
        for roles, until_s in _DRAIN_ORDER:
            if "redis" in roles:
                self._note_redis()
            names = [name for role in roles for name in supervisor.names(role)]
            late += supervisor.stop(names, max(0.0, began_s + until_s - time.monotonic()))
        supervisor.kill(late)

    def _note_endpoints(self) -> None:
        """Keep `endpoints.json` true."""
        found = self._supervisor.endpoints()
        own = Endpoint(role="launcher", pid=os.getpid(), metrics_port=self._metrics_port)
        found = {**self._endpoints, **found, "launcher": own}
        if found == self._endpoints:
            return
        for name in found.keys() - self._endpoints.keys():
            if name != "launcher":
                self._view.event(f"{name} is up (pid {found[name].server_pid or found[name].pid})")
        self._endpoints = found
        temporary = self._plan.run_dir / "endpoints.json.tmp"
        content = {name: asdict(endpoint) for name, endpoint in found.items()}
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(self._plan.run_dir / "endpoints.json")

    def _note_redis(self) -> None:
        for line in ask(self._sockets / "redis.sock", b"INFO server").splitlines():
            if line.startswith(b"redis_version:"):
                version = line.partition(b":")[2].decode().strip()
                self.redis_facts = RedisFacts(version=version, durability=self.redis_facts.durability)

    def _with_server_pid(self, account: Account) -> Account:
        endpoint = self._endpoints.get(account.name)
        if endpoint is None or endpoint.server_pid is None:
            return account
        return Account(
            name=account.name,
            role=account.role,
            pid=endpoint.server_pid,
            restarts=account.restarts,
            cpu_seconds=account.cpu_seconds,
        )


def service_specs(plan: Plan, sockets: Path) -> list[ServiceSpec]:
    """The services of a run, in the order in which a fragment needs them."""
    own_redis = not plan.settings.broker.redis
    redis_url = plan.settings.broker.redis or f"unix://{sockets / 'redis.sock'}"
    broker = f"unix:{sockets / 'broker.sock'}"
    config = ("--config", str(plan.config))
    redis = ("redis", "--socket", str(sockets / "redis.sock"), "--dir", str(plan.run_dir / "redis"), *config)
    learner = ("learner", "--redis", redis_url, "--run-dir", str(plan.run_dir), *config)
    loss = ("--allow-loss",) if plan.allow_loss else ()
    resume = ("--resume", *loss)
    actors = [
        _actor(f"actor-{index}", "rollout", broker, config) for index in range(plan.settings.actor.count)
    ]
    return [
        *([ServiceSpec(name="redis", role="redis", command=penstock(*redis))] if own_redis else []),
        ServiceSpec(
            name="broker",
            role="broker",
            command=penstock("broker", "--redis", redis_url, "--listen", broker, *config),
        ),
        ServiceSpec(
            name="learner",
            role="learner",
            command=penstock(*learner, *(resume if plan.resume else ())),
            on_restart=() if plan.resume else ("--resume",),
        ),
        *actors,
        _actor("evaluator", "evaluation", broker, config),
    ]


def _actor(name: str, role: str, broker: str, config: tuple[str, ...]) -> ServiceSpec:
    command = penstock("actor", "--broker", broker, "--actor-id", name, "--role", role, *config)
    return ServiceSpec(name=name, role="actor" if role == "rollout" else "evaluator", command=command)


def private_folder() -> Path:
    """A new folder, mode 0700, with a path short enough for unix sockets."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="penstock-", dir=base if len(base) < _MAX_SOCKET_FOLDER else "/tmp"))  # noqa: S108


def _own_account() -> Account:
    times = os.times()
    return Account(
        name="launcher", role="launcher", pid=os.getpid(), restarts=0, cpu_seconds=times.user + times.system
    )


def _conclude(plan: Plan, ending: Ending, *, as_json: bool) -> None:
    summary = make_summary(plan, ending)
    write_summary(plan.run_dir, summary)
    _draw_curve(plan.run_dir)
    lines: Sequence[str] = [json.dumps(summary, indent=2)] if as_json else summary_lines(summary)
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _draw_curve(run_dir: Path) -> None:
    from launch.plot import draw

    if (run_dir / "metrics.jsonl").exists():
        draw([run_dir], run_dir / "learning-curve.png")
