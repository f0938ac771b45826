"""The processes of one run, from start to drain.

All start at once: each waits for those it needs. Ends when the learner ends, on Ctrl-C or SIGTERM
(everything drains within the times of `drain_bounds`), or when a service keeps dying. The order of a drain is
the way of a fragment: actors, policy server, learner, broker, Redis. If this process is killed, the kernel
closes the lifeline, and every service drains by itself.
"""

import json
import logging
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from penstock.config.service_settings import origin_of_defaults
from penstock.config.settings import ConfigurationError
from penstock.launch.inspection.curve import MetricsTail
from penstock.launch.inspection.live_view import View
from penstock.launch.run.fork_server import ForkServer
from penstock.launch.run.memory import explain, of_process, together
from penstock.launch.run.plan import Plan, replace_text, take_configuration
from penstock.launch.run.redis_service import ask
from penstock.launch.run.services import private_folder, service_environment, service_specs
from penstock.launch.run.summary import LearnerAccount, RedisFacts
from penstock.launch.run.supervisor import Account, DrainStage, GaveUp, Supervisor, gone_by
from penstock.rpc.address import AddressInUse
from penstock.runtime.exit import EXIT_INTERRUPTED, EXIT_OK
from penstock.runtime.health import Endpoint, Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

TICK_S: Final = 0.1
HEALTH_INTERVAL_S: Final = 5.0
NOTICE_INTERVAL_S: Final = 10.0
SUPERVISION: Final = "supervision"
STALL_S: Final = 60.0
"""Health turns red when the services have not been looked at for this long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How supervising ended: exit code and, when it failed, why."""

    code: int
    cause: str = ""


class Run:
    """The processes of one run and the loop that watches them."""

    def __init__(
        self,
        plan: Plan,
        lifecycle: Lifecycle,
        view: View,
        redis: RedisFacts,
        fork_server: ForkServer,
        page_url: str = "",
    ) -> None:
        """page_url: where a browser sees the run, "" where no page is served."""
        self._plan = plan
        self._page_url = page_url
        self._lifecycle = lifecycle
        self._view = view
        self._health = Health("launcher")
        try:
            section = plan.settings.metrics
            self._metrics_port = serve_http(self._health, section.host, section.port)[1]
        except AddressInUse as error:
            raise ConfigurationError(str(error)) from error
        # The write end stays open in this process alone: children drain when the kernel closes it.
        read_fd, self._lifeline = os.pipe()
        self._supervisor = Supervisor(
            plan.run_dir, read_fd, service_environment(plan.settings), self._say, fork_server
        )
        self._fork_server = fork_server
        self._tail = MetricsTail(plan.run_dir / "metrics.jsonl")
        self._account = LearnerAccount(plan.run_dir)
        self._is_training = False
        self._most_steps = 0
        self._endpoints: dict[str, Endpoint] = {}
        self.redis_facts = redis
        self._sockets = private_folder()

    def go(self) -> Outcome:
        """Start the services, watch them until the run ends, and drain them."""
        try:
            return self._go()
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _go(self) -> Outcome:
        self._lifecycle.on_drain(self._supervisor.wake)
        # It may still be importing, or hang, and the drain does not wait for it.
        self._lifecycle.on_drain(self._fork_server.give_up)
        specs = service_specs(self._plan, self._sockets)
        self._say(f"{self._plan.settings.run}: starting {', '.join(spec.name for spec in specs)}")
        self._say(f"everything of this run is in {self._plan.run_dir}")
        if not self._plan.resumption.resume:
            self._say(origin_of_defaults(self._plan.settings))
        if self._page_url:
            self._say(f"its page is {self._page_url}")
        for spec in specs:
            self._supervisor.start(spec)
        try:
            outcome = self._watch()
        except GaveUp as error:
            outcome = Outcome(code=error.code, cause=explain(str(error), self._plan.run_dir))
            self._say(f"giving up: {outcome.cause}")
        self._drain()
        self._fork_server.close()
        if self.has_learned:
            take_configuration(self._plan)
        return outcome

    @property
    def learnt(self) -> dict[str, Any]:
        """The final account of this attempt's learner; empty where it wrote none."""
        return self._account.read()

    @property
    def has_learned(self) -> bool:
        return self._is_training or bool(self.learnt)

    def accounts(self) -> list[Account]:
        """Return the services' accounts, with Redis under its server's own pid, and the launcher's."""
        times, fork_server = os.times(), self._fork_server
        own = Account(
            name="launcher",
            role="launcher",
            pid=os.getpid(),
            restarts=0,
            cpu_seconds=times.user + times.system + fork_server.cpu_seconds,
            memory=together([of_process(os.getpid()), fork_server.memory]),
        )
        servers = {name: one.server_pid for name, one in self._endpoints.items()}
        services = [replace(one, pid=servers.get(one.name) or one.pid) for one in self._supervisor.accounts()]
        return [*services, own]

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self._view.event(text)

    def _watch(self) -> Outcome:
        self._health.set_ready(ready=True)
        self._health.watch(SUPERVISION, STALL_S)
        next_health_s = time.monotonic() + HEALTH_INTERVAL_S
        next_notice_s = time.monotonic() + NOTICE_INTERVAL_S
        while not self._lifecycle.draining.is_set():
            if self._supervisor.is_done("learner"):
                return self._learner_ended()
            self._note_endpoints()
            progress = self._tail.poll()
            if progress is not None:
                if not self._is_training:  # experience has come since this launcher's start
                    self._is_training = True
                    take_configuration(self._plan)
                    self._say("training")
                # A learner that went back to its checkpoint repeats steps, which are no progress.
                if progress.env_steps > self._most_steps:
                    self._most_steps = progress.env_steps
                    self._supervisor.note_progress()
                self._view.show(progress)
            elif time.monotonic() >= next_notice_s:
                next_notice_s = time.monotonic() + NOTICE_INTERVAL_S
                waiting = [f"{name} ({line})" if line else name for name, line in self._supervisor.unready()]
                self._say(f"waiting for {', '.join(waiting) or 'the first experience'}")
            if time.monotonic() >= next_health_s:
                next_health_s = time.monotonic() + HEALTH_INTERVAL_S
                self._supervisor.check_health()
            self._supervisor.step(TICK_S)
            self._health.progress(SUPERVISION)
        return Outcome(code=EXIT_INTERRUPTED)

    def _learner_ended(self) -> Outcome:
        """EXIT_OK: it reached its target or all steps. EXIT_INTERRUPTED: an operator or a signal ended it."""
        if self.learnt.get("finished"):
            return Outcome(code=EXIT_OK)
        self._say("the learner was asked to end; `penstock train --resume` goes on from here")
        return Outcome(code=EXIT_INTERRUPTED)

    def _drain(self) -> None:
        """Drain actors, policy server, learner, broker and Redis within their bounds, then kill the rest."""
        self._health.set_ready(ready=False, why="draining")
        self._note_endpoints()
        supervisor = self._supervisor
        if self._lifecycle.draining.is_set():
            self._say("draining: actors, learner (last checkpoint), broker, redis")
        began_s = time.monotonic()
        late: list[str] = []
        bounds = gone_by(serves=bool(supervisor.names(DrainStage.SERVING)))
        for stage, until_s in bounds.items():
            if stage is DrainStage.REDIS:
                self._note_redis()
            late += supervisor.stop(supervisor.names(stage), max(0.0, began_s + until_s - time.monotonic()))
        supervisor.kill(late)

    def _note_endpoints(self) -> None:
        found = self._supervisor.endpoints()
        own = Endpoint(
            role="launcher", pid=os.getpid(), metrics_port=self._metrics_port, address=self._page_url
        )
        found = {**self._endpoints, **found, "launcher": own}
        if found == self._endpoints:
            return
        for name in found.keys() - self._endpoints.keys():
            if name != "launcher":
                self._say(f"{name} is up (pid {found[name].server_pid or found[name].pid})")
        self._endpoints = found
        try:
            for name, content in (
                ("endpoints.json", {name: asdict(one) for name, one in found.items()}),
                ("targets.json", self._targets()),
            ):
                replace_text(self._plan.run_dir / name, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            # Services that cannot write end the run with the cause; these files alone do not.
            self._say(f"endpoints.json or targets.json is not up to date: {error.strerror}")

    def _targets(self) -> list[dict[str, Any]]:
        """Return every metrics port by the service's name, as Prometheus reads it (`file_sd_configs`)."""
        return [
            {
                "targets": [f"127.0.0.1:{endpoint.metrics_port}"],
                "labels": {"run": self._plan.settings.run, "instance": name},
            }
            for name, endpoint in sorted(self._endpoints.items())
        ]

    def _note_redis(self) -> None:
        if self._plan.settings.broker.redis:
            return  # examined before the start
        found = re.search(rb"redis_version:(\S+)", ask(self._sockets / "redis.sock", b"INFO server"))
        if found:
            self.redis_facts = replace(self.redis_facts, version=found[1].decode())
