"""`penstock rlhf reward`: a reward model from feedback, its scores, and the service that gives them."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.foreground import (
    AsJson,
    Assignments,
    ConfigFile,
    EndpointFile,
    Insecure,
    finish,
    in_foreground,
)
from penstock.runtime.output_file import output_file

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle
    from penstock.workloads.language.reward.reward_source import RewardSource, Sample

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
        return train_model(
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
        return score_file(
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
        with needs_rlhf():
            from penstock.workloads.language.quiet import quieten
            from penstock.workloads.language.reward.reward_service import main

            quieten()
            return main(lifecycle, settings, folder=model, base=base, device=device, listen=listen)

    in_foreground("reward", body, config, assignments, endpoints, insecure=insecure)


PAGE: Final = 256
"""Rows that are scored at once."""


@contextmanager
def needs_rlhf() -> Iterator[None]:
    """Name the extra where a package of it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error}: {how_to_install('rlhf')}") from error


def parse_columns(said: Sequence[str]) -> dict[str, str]:
    """`OURS=THEIRS` as a mapping; raises ConfigurationError."""
    pairs = [text.partition("=") for text in said]
    for (ours, equals, theirs), text in zip(pairs, said, strict=True):
        if not (ours and equals and theirs):
            raise ConfigurationError(f"--column {text!r}: write OURS=THEIRS, such as score=helpfulness")
    return {ours: theirs for ours, _, theirs in pairs}


# ---- Training.


def train_model(
    lifecycle: "Lifecycle",
    *,
    feedback: str,
    model: str,
    out: Path,
    scale: str,
    key: str | None,
    part: str | None,
    columns: Sequence[str],
    heads: Sequence[str],
    weights: Sequence[str],
    reference: str | None,
    resume: bool,
    device: str | None,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    """Train and print the summary; raises ConfigurationError for what cannot be used."""
    of_heads = bool(heads or weights)
    if of_heads:
        _check_options(
            {
                "--scale": scale != "none",
                "--key": key is not None,
                "--column": bool(columns),
                "--reference": reference is not None,
                "--resume": resume,
            }
        )
    from penstock.runtime.retry import Interrupted

    with needs_rlhf():
        from penstock.workloads.language.feedback.examples import parse_scale
        from penstock.workloads.language.feedback.feedback_places import Source
        from penstock.workloads.language.loading import device_of
        from penstock.workloads.language.quiet import quieten
        from penstock.workloads.language.reward.heads import parse_heads, parse_weights
        from penstock.workloads.language.reward.training import Order, train
        from penstock.workloads.language.settings import training_settings
    quieten()
    try:
        measured = parse_scale(scale)
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from error
    named = parse_columns(columns)
    order = Order(
        source=Source(place=feedback, scale=measured, part=part, key=key, columns=named),
        base=model,
        out=out,
        settings=training_settings(tuple(assignments)),
        reference=None if reference is None else Source(place=reference, scale=measured, columns=named),
        resume=resume,
        device=device_of(device or "cpu") if of_heads else device,
        heads=parse_heads(heads) if of_heads else (),
        weights=parse_weights(weights),
    )
    try:
        results = train(order, lifecycle.draining)
    except Interrupted:
        if of_heads:
            sys.stderr.write(f"interrupted: nothing was written to {out}; start again\n")
        return EXIT_OK
    lines = (_heads_lines if of_heads else _lines)(out, results)
    sys.stdout.write(json.dumps(results) + "\n" if as_json else "\n".join(lines) + "\n")
    return EXIT_OK


def _check_options(said: dict[str, bool]) -> None:
    """Raise ConfigurationError for an option that says something of a model of one head."""
    for name, is_said in said.items():
        if is_said:
            raise ConfigurationError(f"{name}: is for a model of one head; leave it out beside --head")


def _lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    from penstock.workloads.language.reward.measures import doubt

    feedback = results["feedback"]
    found = results["validation"] or {}
    measured = "  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)
    trained, validated = (
        f"{feedback[side]['scored']} scores and {feedback[side]['pairs']} pairs"
        for side in ("train", "validation")
    )
    return [
        f"{out}: {results['steps']} steps in {results['seconds']:g} s, best at step {results['best_step']}",
        f"trained on {trained}, validated on {validated}",
        f"{feedback['bad_rows']} bad rows, {feedback['prompts_cut']} prompts cut",
        f"validation: {measured or 'none'}",
        *([doubted] if (doubted := doubt(results["validation"])) else []),
        f"scores: mean {results['reward_mean']:.4g}, std {results['reward_std']:.4g}",
        f"sha256 {results['sha256']}",
    ]


def _heads_lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    measures = results["measures"]
    pairs = measures["pair_accuracy"]
    return [
        f"{out}: best after epoch {results['best_epoch']}",
        f"trained on {results['train']['responses']} responses and {results['train']['pairs']} pairs",
        *(f"{name}: {_measured(one)}" for name, one in measures["heads"].items()),
        f"pairs: {measures['pairs']}" + ("" if pairs is None else f", {pairs:.3g} in the right order"),
        f"{results['bad_rows']} bad rows, {results['other_key']} rows rate something else",
    ]


def _measured(one: dict[str, Any]) -> str:
    numbers = "".join(
        f", {name.replace('_', ' ')} {one[name]:.3g}"
        for name in ("squared_error", "auc", "calibration_error")
        if one[name] is not None
    )
    return f"{one['ratings']} ratings held out{numbers}"


# ---- Scores.


def score_file(
    place: str,
    file: str,
    *,
    output: Path | None,
    part: str | None,
    columns: Sequence[str],
    base: str | None,
    device: str,
    config: Path | None,
    assignments: tuple[str, ...],
) -> int:
    """Score and write; bad rows are counted and named on stderr. Raises ConfigurationError, Fatal."""
    if output is not None and output.exists() and Path(file).exists() and output.samefile(file):
        raise ConfigurationError(f"--output {output}: is the file that is read; choose another name")
    from penstock.config.credentials import credentials, http_headers
    from penstock.config.service_settings import service_settings

    with needs_rlhf():
        from penstock.workloads.language.quiet import quieten
        from penstock.workloads.language.reward.opening import open_source
        from penstock.workloads.language.reward.reward_source import RewardError
    quieten()
    settings = service_settings(config, assignments)
    source = open_source(
        place,
        is_local=True,
        credentials=credentials(settings.security),
        headers=http_headers(settings.security),
        base=base,
        device=device,
    )
    with ExitStack() as stack:
        stack.callback(source.close)
        out = sys.stdout if output is None else stack.enter_context(output_file(output))
        try:
            for line in _scored(source, file, part, parse_columns(columns)):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
        except RewardError as error:
            raise Fatal(str(error)) from error
    return EXIT_OK


def _scored(
    source: "RewardSource", file: str, part: str | None, columns: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    from penstock.workloads.language.feedback.examples import BadRows
    from penstock.workloads.language.feedback.feedback_places import rows_of

    bad, count = BadRows(), 0
    rows = rows_of(file, part)
    while page := list(islice(rows, PAGE)):
        asked: list[tuple[dict[str, Any], Sample]] = []
        for where, row in page:
            try:
                asked += _asked(where, row, columns)
            except ValueError as error:
                bad.add(where, str(error))
        rewards = source.score([sample for _, sample in asked])
        for (answered, _), value in zip(asked, rewards.values, strict=True):
            yield {**answered, "reward": value, "model": rewards.by.name, "sha256": rewards.by.sha256}
        count += len(asked)
    for line in bad.lines():
        sys.stderr.write(f"bad row: {line}\n")
    if not count:
        raise ConfigurationError(f"{file}: no row can be scored")


def _asked(where: str, row: Any, columns: Mapping[str, str]) -> "list[tuple[dict[str, Any], Sample]]":
    """Return what a row wants scored: its response, or both of its pair; raises ValueError."""
    from penstock.workloads.language.feedback.examples import response_of
    from penstock.workloads.language.prompt import parse_prompt
    from penstock.workloads.language.reward.reward_source import Sample

    if isinstance(row, ValueError):
        raise row
    named = {**row, **{ours: row.get(theirs) for ours, theirs in columns.items()}}
    if named.get("prompt") is None:
        raise ValueError("no prompt")
    prompt = parse_prompt(named["prompt"])
    is_pair = named.get("chosen") is not None or named.get("rejected") is not None
    names = ("chosen", "rejected") if is_pair else ("response",)
    return [
        ({"where": where, "of": name}, Sample(prompt=prompt, response=response_of(named, name)))
        for name in names
    ]
