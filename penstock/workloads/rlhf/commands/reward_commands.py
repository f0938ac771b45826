"""`penstock rlhf reward`: a reward model from feedback, its scores, and the service that gives them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import (
    AsJson,
    Assignments,
    ConfigFile,
    EndpointFile,
    Insecure,
    finish,
    in_foreground,
)

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle

reward_commands = typer.Typer(help="Reward models: train from feedback, score, serve.", no_args_is_help=True)

Base = Annotated[
    str | None,
    typer.Option("--base", help="Folder or hub name of the adapter's base model, where it has moved."),
]


def _device(name: str | None) -> str | None:
    """The name of a device that torch knows, or auto; raises typer.BadParameter."""
    if name is not None and not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", name):
        raise typer.BadParameter(f"{name!r}: use auto, cpu, cuda or cuda:N")
    return name


Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", callback=_device)]
Part = Annotated[str | None, typer.Option("--part", help="Split of a dataset, or policy of a registry.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="OURS=THEIRS", help="Column of the file under another name; may be repeated."
    ),
]


@reward_commands.command()
def train(
    feedback: Annotated[
        str, typer.Argument(help="JSON lines, Parquet, a dataset's folder, or a registry's URL.")
    ],
    model: Annotated[str, typer.Option(help="Base model: a folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    scale: Annotated[
        str, typer.Option(help="Of the scores: thumbs, stars, percent, LOW:HIGH, or none.")
    ] = "none",
    key: Annotated[str | None, typer.Option(help="Take rows that rate this.")] = None,
    part: Part = None,
    columns: Columns = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="NAME=SCALE",
            help="Something that rows rate, by their key; may be repeated, for one model of several heads.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="NAME=NUMBER", help="Of a head in the reward, default 1; may be repeated."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help=(
                "Scored rows like FEEDBACK's over which mean and std are taken; default: what was trained on."
            )
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was interrupted.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, or a GPU where there is one (default).", callback=_device)
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="epochs, batch, learning_rate, rank, lora, …; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on scores or pairs. Ctrl-C writes a checkpoint; --resume goes on from it.

    With --head it learns several things at once, each as 0 to 1, and pairs beside them (docs/chat.md).
    """

    def body(lifecycle: "Lifecycle") -> int:
        from penstock.workloads.rlhf.commands.reward_training import main

        return main(
            lifecycle,
            feedback=feedback,
            model=model,
            out=out,
            scale=scale,
            key=key,
            part=part,
            columns=columns or (),
            heads=heads or (),
            weights=weights or (),
            reference=reference,
            resume=resume,
            device=device,
            assignments=assignments or (),
            as_json=as_json,
        )

    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(body, "reward"))


@reward_commands.command()
def score(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a reward model, grpc://HOST:PORT, http(s)://…, or module:function.",
        ),
    ],
    file: Annotated[
        str, typer.Argument(help="Rows with `prompt` and `response`, or `chosen` and `rejected`.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of JSON lines; default: stdout.")
    ] = None,
    part: Part = None,
    columns: Columns = None,
    base: Base = None,
    device: Device = "cpu",
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Score responses: a JSON object per row of FILE, with `where` and `reward`."""

    def body() -> int:
        from penstock.workloads.rlhf.commands.reward_scoring import main

        return main(
            source,
            file,
            output=output,
            part=part,
            columns=columns or (),
            base=base,
            device=device,
            config=config,
            assignments=tuple(assignments or ()),
        )

    finish(body)


@reward_commands.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Folder of a reward model.")],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:/path.")
    ] = "127.0.0.1:50053",
    base: Base = None,
    device: Device = "cpu",
    config: ConfigFile = None,
    assignments: Assignments = None,
    endpoints: EndpointFile = None,
    insecure: Insecure = False,
) -> None:
    """Serve a reward model's scores over gRPC."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        from penstock.workloads.rlhf.commands.reward_scoring import needs_rlhf

        with needs_rlhf():
            from penstock.workloads.language.quiet import quieten
            from penstock.workloads.language.reward.reward_service import main

            quieten()
            return main(lifecycle, settings, folder=model, base=base, device=device, listen=listen)

    in_foreground("reward", body, config, assignments, endpoints, insecure=insecure)
