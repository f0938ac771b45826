"""`penstock inject`: goals that a served policy proposes; `penstock traces`: logs of tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import (
    AsJson,
    Configured,
    Foreground,
    Trust,
    command,
    finish,
    unfolded,
)

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectOptions:
    """Options of `penstock inject`; `veto`, `switch` and `explain` end at once."""

    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Of the goals and their outcomes.")
    ] = Path("injector")
    server: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Policy server, HOST:PORT or unix:/path.")
    ] = "127.0.0.1:50052"
    policy: Annotated[str, typer.Option(help="Which policy of the server.")] = "default"
    goals: Annotated[
        Path | None, typer.Option("--goals", metavar="FILE", help="Goals that are commands.")
    ] = None
    simulated: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="The simulated host instead of commands.")
    ] = None
    auto: Annotated[
        bool, typer.Option("--auto", help="Carry goals out; without it they are only proposed.")
    ] = False
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Least certainty π(a) of a goal that is carried out.")
    ] = 0.7
    explore: Annotated[
        float, typer.Option(min=0, max=1, help="Share of safe goals below the threshold that are tried.")
    ] = 0.02
    interval: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds from one decision to the next.")
    ] = 30.0
    quiet: Annotated[
        tuple[str, ...],
        typer.Option(metavar="HH:MM-HH:MM", help="Local hours without goals; may be repeated."),
    ] = ()
    daily_limit: Annotated[int, typer.Option(min=0, max=100_000, help="Most goals of a day.")] = 1000
    veto_s: Annotated[
        float, typer.Option("--veto-s", min=0, max=3600, help="Seconds in which a goal may be vetoed.")
    ] = 0.0
    steps: Annotated[int, typer.Option(min=0, help="Intervals after which it ends; 0: never.")] = 0
    client_key: Annotated[str, typer.Option(help="This host's name for the server.")] = "injector"
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws below the threshold.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue although it had stopped itself.")] = False
    veto: Annotated[
        str | None, typer.Option(metavar="GOAL_ID", help="Forbid a goal that was proposed, and end.")
    ] = None
    switch: Annotated[
        str | None,
        typer.Option(metavar="on|off", help="Carry goals out from now on, or only propose them, and end."),
    ] = None
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why goals were not injected and how the others ended, and end."),
    ] = False


@unfolded
def inject(options: InjectOptions, called: Configured, as_json: AsJson = False) -> None:
    """Propose goals by a served policy, carry them out, and send their rewards to the server."""
    if options.veto is not None or options.switch is not None or options.explain:

        def at_once() -> int:
            from penstock.workloads.goals.injector_view import once

            return once(options, as_json=as_json)

        finish(at_once)

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.workloads.goals.injector import work

        return work(options, lifecycle, settings, as_json=as_json)

    Foreground(config=called.config, assignments=called.assignments, insecure=called.insecure).run(
        "injector", body
    )


trace_commands = typer.Typer(
    help="Logs of tasks: check, import, evaluate policies on them.", no_args_is_help=True
)

LogFile = Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, one for each decision.")]
RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        metavar="KEY=NUMBER",
        help="success, failure, crash, step, fast, fast_ms; may be repeated.",
    ),
]


@command(trace_commands)
def check(file: LogFile, as_json: AsJson = False) -> int:
    """Print the content of a log and its faults by line; exit 1 where it has faults."""
    from penstock.workloads.goals.log_evaluation import check

    return check(file, as_json=as_json)


@command(trace_commands, "import")
def import_log(
    file: LogFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the recording, a new one.")],
    reward: RewardOption = None,
    as_json: AsJson = False,
) -> int:
    """Make a recording of a log, for `penstock train --from`."""
    from penstock.workloads.goals.trace_import import main

    return main(file, out, reward=reward or (), as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Options of `penstock traces evaluate`."""

    policy: Annotated[
        list[str],
        typer.Option(
            "--policy", metavar="RUN", help="Folder of a run, uniform, or always:ACTION; may be repeated."
        ),
    ]
    discount: Annotated[float, typer.Option(min=0, max=1, help="Of later rewards.")] = 1.0
    reward: RewardOption = None
    late: Annotated[
        str | None,
        typer.Option("--late", metavar="PLACE", help="Late rewards: JSON lines, or the URL of a registry."),
    ] = None
    late_policy: Annotated[str, typer.Option("--late-policy", help="Whose late rewards, of a registry.")] = (
        "default"
    )
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Judge the most likely actions of a run's policy.")
    ] = False
    trust: Trust = False


@command(trace_commands)
def evaluate(file: LogFile, options: EvaluateOptions, as_json: AsJson = False) -> int:
    """Estimate what policies would have earned, with 95% intervals; exit 1 where the log cannot say."""
    from penstock.workloads.goals.log_evaluation import evaluate

    return evaluate(file, options, as_json=as_json)
