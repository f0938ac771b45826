"""`penstock train`: one run on one machine, from nothing to the summary.

Starts every service of the run, watches them (`penstock.launch.run`), and concludes: `summary.json`, the
learning curve, the summary on stdout. Exit 0 when the run is done, 130 when it was interrupted (Ctrl-C,
SIGTERM, an operator's Stop), else 1 or 2 with the cause on the last stderr line.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from penstock.config.run_folder import held_folder
from penstock.config.workload import find, load
from penstock.launch.inspection.live_view import WatchedStream, limits_of, make_view
from penstock.launch.run.fork_server import ForkServer
from penstock.launch.run.memory import DeviceMemory
from penstock.launch.run.plan import Plan, make_folders, prepare_folder, prepared
from penstock.launch.run.run import Run
from penstock.launch.run.summary import (
    SUMMARY_FILE,
    Ending,
    RedisFacts,
    make_summary,
    summary_lines,
    write_summary,
)
from penstock.runtime import logs
from penstock.runtime.exit import EXIT_INTERRUPTED
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted


def train(plan: Plan, fork_server: ForkServer, *, as_json: bool, ui: bool = False) -> int:
    """Run a plan, and return the exit code. ui: serve a page that shows the run until it ends."""
    started_s = time.monotonic()
    lifecycle = Lifecycle("launcher")
    lifecycle.install()
    try:
        redis = _examine_redis(plan, lifecycle)
    except Interrupted:
        return EXIT_INTERRUPTED
    with held_folder(plan.run_dir), _page(plan, ui=ui) as url:
        return _train(plan, redis, fork_server, lifecycle, started_s, as_json=as_json, page_url=url)


@contextmanager
def _page(plan: Plan, *, ui: bool) -> Iterator[str]:
    """Yield the URL of the page of the run; "" without a page."""
    if not ui:
        yield ""
        return
    from penstock.launch.ui.server import BESIDE_A_RUN, Page

    with Page(plan.run_dir.parent, BESIDE_A_RUN, insecure=False) as page:
        yield f"{page.url}#/run/{plan.run_dir.name}"


def _train(
    plan: Plan,
    redis: RedisFacts,
    fork_server: ForkServer,
    lifecycle: Lifecycle,
    started_s: float,
    *,
    as_json: bool,
    page_url: str,
) -> int:
    make_folders(plan)
    stream = sys.stderr if as_json else sys.stdout
    log_path = plan.run_dir / "logs" / "launcher.log"
    with logs.at_end_of(log_path, "launcher", plan.settings.run, style=plan.settings.logs.format):
        device = DeviceMemory()
        try:
            limits = limits_of(plan.settings.learner)
            with make_view(stream, plan.settings.run, limits, plan.target) as view:
                preparing_s = time.monotonic()
                plan = prepared(plan, lifecycle, view.event)
                preparation_s = time.monotonic() - preparing_s
                prepare_folder(plan)
                run = Run(plan, lifecycle, view, redis, fork_server, page_url)
                outcome = run.go()
        except Interrupted:
            sys.stderr.write(f"interrupted while preparing; with --run-dir {plan.run_dir} it goes on\n")
            return EXIT_INTERRUPTED
        finally:
            device.close()
            plan.next_config.unlink(missing_ok=True)
        ending = Ending(
            wall_seconds=time.monotonic() - started_s,
            preparation_seconds=preparation_s,
            device_memory=device.peak,
            interrupted=outcome.code == EXIT_INTERRUPTED,
            cause=outcome.cause,
            accounts=run.accounts(),
            redis=run.redis_facts,
        )
        try:
            if run.has_learned or not (plan.run_dir / SUMMARY_FILE).exists():
                _conclude(plan, ending, run.learnt, as_json=as_json)
            else:
                sys.stderr.write(f"nothing was learned: {plan.run_dir / SUMMARY_FILE} is as it was\n")
        except OSError as error:
            sys.stderr.write(f"the summary was not written: {error}\n")
        if outcome.cause:
            sys.stderr.write(f"{outcome.cause}\n")
        return outcome.code


def _examine_redis(plan: Plan, lifecycle: Lifecycle) -> RedisFacts:
    """Return facts about the run's Redis before the start; the version only of a server of the user.

    Raises ConfigurationError where that server is unsuitable, Fatal where it does not answer within
    `broker.redis_wait_s`, Interrupted when the lifecycle drains first.
    """
    section = plan.settings.broker
    if not section.redis:
        return RedisFacts(version="", durability=section.durability)
    from penstock.broker.log import connection
    from penstock.broker.service.process import connect_inspector, wait_for_redis
    from penstock.runtime.server_frame import setter

    async def examined() -> RedisFacts:
        stop, inspector = asyncio.Event(), connect_inspector(section.redis, plan.settings.security)
        with lifecycle.calling_on_drain(setter(stop)):
            try:
                ask = partial(connection.examine, inspector, section.redis, section)
                facts = await wait_for_redis(ask, section.redis, section.redis_wait_s, stop)
            finally:
                await inspector.aclose()
        return RedisFacts(version=facts.version, durability=facts.durability.label)

    logs.configure("launcher")
    return asyncio.run(examined())


def _conclude(plan: Plan, ending: Ending, learnt: dict[str, Any], *, as_json: bool) -> None:
    from penstock.launch.commands.plot import draw

    summary = make_summary(plan, ending, learnt)
    write_summary(plan.run_dir, summary)
    workload = find(plan.settings.workload)
    if workload.artefacts:
        load(workload.artefacts)(plan.settings, plan.run_dir, summary)
    if (plan.run_dir / "metrics.jsonl").exists():
        draw([plan.run_dir], plan.run_dir / "learning-curve.png")
    summary["disk_bytes"] = sum(one.stat().st_size for one in plan.run_dir.rglob("*") if one.is_file())
    write_summary(plan.run_dir, summary)
    lines: Sequence[str] = [json.dumps(summary, indent=2)] if as_json else summary_lines(summary)
    tell(lines)


def tell(lines: Sequence[str]) -> None:
    """Write lines on stdout, whose reader may be gone: the summary is in the folder of the run, too."""
    stream = WatchedStream(sys.stdout)
    stream.write("\n".join(lines) + "\n")
    stream.flush()
