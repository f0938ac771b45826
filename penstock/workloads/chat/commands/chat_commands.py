"""`penstock chat`: the base of a chat, ratings that can be believed, guardrails, and the loop."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.foreground import AsJson, finish
from penstock.workloads.chat.commands.loop_commands import loop_commands

if TYPE_CHECKING:
    from penstock.runtime.lifecycle import Lifecycle

chat_commands = typer.Typer(help="Chat: its base, ratings, guardrails, its loop.", no_args_is_help=True)
guard_commands = typer.Typer(help="Guardrails: train their classifier, check texts.", no_args_is_help=True)
chat_commands.add_typer(guard_commands, name="guard")
chat_commands.add_typer(loop_commands, name="loop")


@chat_commands.command()
def pretrain(
    files: Annotated[
        list[Path],
        typer.Argument(help="Conversations: JSON lines or a JSON list, OpenAI's form or ShareGPT's."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of a model to train further; default: a small one of these words."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="epochs, batch, learning_rate, max_tokens, …; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the supervised base of a chat on conversations."""

    def body(lifecycle: "Lifecycle") -> int:
        from penstock.workloads.chat.commands.pretrain_command import main

        return main(lifecycle, files, out, model=model, assignments=tuple(assignments or ()), as_json=as_json)

    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(body, "pretrain"))


@chat_commands.command()
def ratings(
    file: Annotated[
        str, typer.Argument(help="JSON lines, Parquet, a dataset's folder, or a registry's URL.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of JSON lines for what counts.")],
    part: Annotated[
        str | None, typer.Option("--part", help="Split of a dataset, or policy of a registry.")
    ] = None,
    deleted: Annotated[
        Path | None, typer.Option(help="File with the names of raters who are gone, one a line.")
    ] = None,
    daily_cap: Annotated[int, typer.Option(help="Most ratings of a person that count in 24 hours.")] = 200,
    false_alarms: Annotated[
        float, typer.Option(help="Bound of the chance that anybody honest is taken for a liar.")
    ] = 0.01,
    judge: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Folder of a reward model of several heads, whose `thumb` people are held against; default: "
                "what others say of the same response."
            )
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Folder or hub name of the judge's base model, where it has moved.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the ratings that count, and tell what was dropped, why and whose it was."""

    def body() -> int:
        from penstock.workloads.chat.commands.ratings_command import main

        return main(
            file, output, part=part, deleted=deleted, daily_cap=daily_cap, false_alarms=false_alarms,
            judge=judge, base=base, as_json=as_json,
        )  # fmt: skip

    finish(body)


@guard_commands.command()
def train(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the classifier to.")],
    rows: Annotated[
        Path | None,
        typer.Option(
            help='Lines of {"text": …, "blocked": true or false}; default: packaged texts (extra `data`).'
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Chance from which a text is blocked.")
    ] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Train the classifier of what people say; tell its recall and false alarms on texts held out."""

    def body() -> int:
        from penstock.workloads.chat.commands.guard_command import train

        return train(output, rows, threshold=threshold, as_json=as_json)

    finish(body)


@guard_commands.command()
def check(
    file: Annotated[str, typer.Argument(help="Texts, one a line; - is stdin.")],
    classifier: Annotated[
        Path | None, typer.Option(help="Of `penstock chat guard train`; default: rules alone.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="TOML file of rules beside those that are built in.")
    ] = None,
    direction: Annotated[
        str, typer.Option(help="input: what people say; output: what a model says.")
    ] = "input",
) -> None:
    """Print an object a line: whether the text is blocked, and by what. Exit 1 where any is."""

    def body() -> int:
        from penstock.workloads.chat.commands.guard_command import check

        return check(file, classifier, rules, direction)

    finish(body)
