"""The `penstock` command line. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted.

Commands import what they need when they run: help is fast, and a broker loads no torch.
"""

import os
import signal
import sys
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.launch.cli.plugin_commands import WithPluginCommands
from penstock.launch.commands.request import Order, Play, Request
from penstock.launch.commands.service_commands import actor, broker, learner, redis, serve
from penstock.launch.control.control_commands import control_commands
from penstock.launch.gateway.gateway_commands import gateway_commands
from penstock.launch.jobs.job_commands import job_commands
from penstock.launch.policy.policy_commands import policy_commands
from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.exit import EXIT_USAGE
from penstock.runtime.foreground import (
    AsJson,
    Assignments,
    Configured,
    Runs,
    Trust,
    command,
    finite,
    unfolded,
)

# Before numpy is imported: for matrices as small as a policy's its own threads only spin, whatever the user's
# environment says. Tokenizers would take a thread for each core.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

app = typer.Typer(
    cls=WithPluginCommands,
    help="Asynchronous actor-learner reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@command(app)
def train(
    request: Request,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve a page on a free port of loopback that shows the run.")
    ] = False,
    as_json: AsJson = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved configuration and stop.")
    ] = False,
    advanced: Annotated[
        bool, typer.Option("--advanced", help="With --print-config: the advanced settings, too.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the run's predicted minutes and peak memory, from a short run of it."
        ),
    ] = False,
) -> int:
    """Train a policy: actors, broker, Redis and learner on this machine."""
    if print_config or dry_run:
        return _looked_at(request, advanced=advanced, dry_run=dry_run, ui=ui, as_json=as_json)
    from penstock.launch.run.fork_server import ForkServer

    # It imports what the services need while this process imports what a plan needs.
    with closing(ForkServer()) as fork_server:
        from penstock.launch.commands.train import train as run
        from penstock.launch.run.plan import make_plan

        return run(make_plan(request), fork_server, as_json=as_json, ui=ui)


def _looked_at(request: Request, *, advanced: bool, dry_run: bool, ui: bool, as_json: bool) -> int:
    """Show the configuration of a run, or what it will take, without the run."""
    from penstock.launch.run.plan import make_plan

    plan = make_plan(request)
    if not dry_run:
        from penstock.config.settings import shown

        sys.stdout.write(shown(plan.settings, advanced=advanced))
        return 0
    from penstock.launch.commands.dry_run import check, main

    check(plan, recording=request.recording is not None, ui=ui)
    return main(plan, as_json=as_json)


for service in (redis, broker, actor, learner, serve):
    app.command()(unfolded(service))

app.add_typer(policy_commands, name="policy")
app.add_typer(control_commands, name="control")
app.add_typer(gateway_commands, name="gateway")
app.add_typer(job_commands, name="jobs")


@command(app)
def status(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run on this machine.")] = None,
    broker_address: Annotated[
        str | None, typer.Option("--broker", metavar="ADDRESS", help="Ask this broker.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once instead of going on.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, callback=finite, help="Seconds between two looks.")
    ] = 1.0,
    as_json: AsJson = False,
    *,
    configured: Configured,
) -> int:
    """Show what a run is doing and what sets its pace, until Ctrl-C on a terminal, else once.

    Section `security` of the configuration names the files for TLS.
    """
    from penstock.launch.inspection.status import main

    return main(run, broker_address, configured, as_json=as_json, once=once, interval_s=interval)


@command(app)
def audit(
    run: Annotated[Path, typer.Argument(help="Folder of a run, going on or ended.")],
    journals: Annotated[
        list[Path] | None,
        typer.Option(
            "--journal",
            metavar="DIR",
            help=(
                "Folder of the actors' records (actor.ack_journal); may be repeated. Default: the run's own."
            ),
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis", metavar="URL", help="Redis of the run; default: the one it started or was given."
        ),
    ] = None,
    as_json: AsJson = False,
    assignments: Assignments = None,
) -> int:
    """Say for every acknowledged fragment where it went.

    Exit 1 with a list when one is lost, doubled or unaccounted.
    """
    from penstock.launch.audit.audit_command import main

    said = tuple(assignments or ())
    return main(run, redis=redis_url, journals=tuple(journals or ()), assignments=said, as_json=as_json)


@command(app)
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")], play: Play, as_json: AsJson = False
) -> int:
    """Play the final policy of a run on separate environments."""
    from penstock.launch.commands.play import evaluate

    return evaluate(run, play, as_json=as_json)


@command(app)
def record(
    run: Annotated[Path, typer.Argument(help="Folder of a run that has ended.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the recording, a new one.")],
    steps: Annotated[int, typer.Option(min=1, help="Environment steps to record, or little more.")] = 20_000,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="Of the environments and of drawn actions.")
    ] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Take the most likely action; default: draw actions.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Record the final policy of a run at play, for `penstock train --from`.

    For what a learner consumes: learner.record.
    """
    from penstock.launch.commands.play import record_final

    return record_final(
        run, out, steps=steps, seed=seed, deterministic=deterministic, trust=trust, as_json=as_json
    )


@command(app)
def plot(
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="PNG file; default: learning-curve.png in the run's folder, or here for several.",
        ),
    ] = None,
) -> int:
    """Draw return, rate and staleness of runs over environment steps into one picture."""
    from penstock.launch.commands.plot import draw

    single = runs[0] if len(runs) == 1 else Path()
    target = output or single / "learning-curve.png"
    draw(runs, target)
    sys.stdout.write(f"{target}\n")
    return 0


@command(app)
def graph(
    run: Annotated[Path, typer.Argument(help="Folder of a run, going on or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Draw once instead of going on.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, callback=finite, help="Seconds between two pictures.")
    ] = 1.0,
) -> int:
    """Draw the learning curve of a run in the terminal, until it ends."""
    from penstock.launch.commands.plot import main

    return main(run, once=once, interval_s=interval)


@command(app)
def ui(
    runs: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run's own.")] = Path("runs"),
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT; port 0 takes a free one.")
    ] = "127.0.0.1:8470",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address beyond loopback: all who reach it read all.")
    ] = False,
) -> int:
    """Serve a page of runs to one browser, which can also start, steer and stop them."""
    from penstock.launch.ui.server import main

    return main(runs, listen, insecure=insecure)


@command(app)
def certificates(order: Order) -> int:
    """Make an authority, certificates and tokens for a run; called again: new ones of the same authority."""
    from penstock.launch.commands.certificates import main

    return main(order)


@command(app)
def doctor(
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Also ask this server of a model, as OpenAI's API is reached: http://HOST:PORT/v1.",
        ),
    ] = None,
) -> int:
    """Check that this machine can run Penstock."""
    from penstock.launch.commands.doctor import main

    return main(tuple(endpoint or ()))


def main() -> Any:
    """Entry point of the `penstock` command. Modules in the working folder can be named, but hide nothing."""
    _open_what_is_closed()
    try:
        # Of a checkout that is installed as it lies our own packages are found last of all.
        sys.path += [str(Path(__file__).parents[3]), str(Path.cwd())]
    except FileNotFoundError:
        sys.stderr.write("the working folder was deleted; change to one that is there\n")
        sys.exit(EXIT_USAGE)
    # Who starts this process may ignore it, and then no end of a child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name is printed byte for byte
    return app()


def _open_what_is_closed() -> None:
    """Lead a standard stream that is closed (`>&-`) nowhere, lest the next file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - for the process's life
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
