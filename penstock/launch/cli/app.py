"""The `penstock` command line. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted.

These commands import what they need when they run, and the others are imported when they are looked up
(`plugin_commands.COMMANDS`): help is fast, and a broker loads no torch.
"""

import codecs
import os
import signal
import sys
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.launch.cli.plugin_commands import WithPluginCommands
from penstock.launch.commands.request import Request
from penstock.launch.commands.service_commands import actor, broker, learner, redis, serve
from penstock.runtime.exit import EXIT_USAGE
from penstock.runtime.foreground import AsJson, command, unfolded

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
    """Show a run's configuration, or the time and memory that it would take, without starting it."""
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


def main() -> Any:
    """Entry point of the `penstock` command. Modules in the working folder can be named, but hide nothing."""
    _open_what_is_closed()
    try:
        # Of a checkout that is installed as it lies `tests` and `benchmarks` are found last of all.
        sys.path += [str(Path(__file__).parents[3]), str(Path.cwd())]
    except FileNotFoundError:
        sys.stderr.write("the working folder was deleted; change to one that is there\n")
        sys.exit(EXIT_USAGE)
    # Who starts this process may ignore it, and then no end of a child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if isinstance(sys.stdout, TextIOWrapper):
        codecs.register_error("printable", _printable)
        sys.stdout.reconfigure(errors="printable")
    return app()


def _printable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Print a file's name byte for byte, and backslashes for what the terminal's encoding does not have."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _open_what_is_closed() -> None:
    """Lead a standard stream that is closed (`>&-`) nowhere, lest the next file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115 - for the process's life
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
