"""`penstock traces`: logs of tasks, checked and judged."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.foreground import AsJson, Trust, finish

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


@trace_commands.command()
def check(file: LogFile, as_json: AsJson = False) -> None:
    """Say what a log holds and what is wrong with which line; exit 1 where anything is."""

    def body() -> int:
        from penstock.workloads.goals.commands.trace_evaluation import check

        return check(file, as_json=as_json)

    finish(body)


@trace_commands.command("import")
def import_log(
    file: LogFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the recording, a new one.")],
    reward: RewardOption = None,
    as_json: AsJson = False,
) -> None:
    """Make a recording of a log, for `penstock train --from`."""

    def body() -> int:
        from penstock.workloads.goals.commands.trace_import import main

        return main(file, out, reward=reward or (), as_json=as_json)

    finish(body)


@trace_commands.command()
def evaluate(
    file: LogFile,
    policy: Annotated[
        list[str],
        typer.Option(
            "--policy", metavar="RUN", help="Folder of a run, uniform, or always:ACTION; may be repeated."
        ),
    ],
    discount: Annotated[float, typer.Option(min=0, max=1, help="Of later rewards.")] = 1.0,
    reward: RewardOption = None,
    late: Annotated[
        str | None,
        typer.Option("--late", metavar="PLACE", help="Late rewards: JSON lines, or the URL of a registry."),
    ] = None,
    late_policy: Annotated[
        str, typer.Option("--late-policy", help="Whose late rewards, of a registry.")
    ] = "default",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Judge the most likely actions of a run's policy.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what policies would have earned, with 95% intervals; exit 1 where the log cannot say."""

    def body() -> int:
        from penstock.workloads.goals.commands.trace_evaluation import evaluate

        return evaluate(
            file, policy, discount=discount, reward=reward or (), late=late, late_policy=late_policy,
            deterministic=deterministic, trust=trust, as_json=as_json,
        )  # fmt: skip

    finish(body)
