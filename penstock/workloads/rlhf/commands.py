"""`penstock rlhf`: feedback as a file, reward models, and responses of a run's final language model."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.foreground import (
    AsJson,
    Assignments,
    ConfigFile,
    Listen,
    SecuredForeground,
    Trust,
    command,
    unfolded,
)
from penstock.runtime.output_file import output_file

if TYPE_CHECKING:
    from penstock.config.settings import Settings
    from penstock.runtime.lifecycle import Lifecycle
    from penstock.workloads.language.feedback import BadRows
    from penstock.workloads.language.reward.reward_source import RewardSource, Sample

rlhf_commands = typer.Typer(help="Feedback, reward models, and answers of a run.", no_args_is_help=True)
feedback_commands = typer.Typer(
    help="Feedback: out of a registry, a data set or a file.", no_args_is_help=True
)
reward_commands = typer.Typer(help="Reward models: train from feedback, score, serve.", no_args_is_help=True)
rlhf_commands.add_typer(feedback_commands, name="feedback")


def _device(name: str | None) -> str | None:
    """Return the name of a device of torch, or auto; raises typer.BadParameter."""
    if name is not None and not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", name):
        raise typer.BadParameter(f"{name!r}: use auto, cpu, cuda or cuda:N")
    return name


Base = Annotated[
    str | None,
    typer.Option("--base", help="Folder or hub name of the adapter's base model, where it has moved."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", callback=_device)]
Part = Annotated[str | None, typer.Option("--part", help="Split of a dataset, or policy of a registry.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File of JSON lines; default: stdout.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="OURS=THEIRS", help="Column of the file under another name; may be repeated."
    ),
]


@contextmanager
def needs_rlhf() -> Iterator[None]:
    """Raise ConfigurationError with the extra to install where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error}: {how_to_install('rlhf')}") from error


@contextmanager
def _lines_to(output: Path | None, source: str) -> Iterator[IO[str]]:
    """Yield the file for lines made of `source`; None: stdout. Raises ConfigurationError, OSError."""
    if output is None:
        yield sys.stdout
        return
    if output.exists() and Path(source).exists() and output.samefile(source):
        raise ConfigurationError(f"--output {output}: is the file that is read; choose another name")
    with output_file(output) as file:
        yield file


def _report(bad: "BadRows") -> None:
    for line in bad.lines():
        sys.stderr.write(f"bad row: {line}\n")


# ---- Feedback.


@feedback_commands.callback()
def _group() -> None:
    """Feedback: out of a registry, a data set or a file."""


@command(feedback_commands)
def export(
    place: Annotated[
        str, typer.Argument(help="A registry's URL, a dataset's folder, Parquet, or JSON lines.")
    ],
    output: Output = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Policy of a registry, or split of a dataset.")
    ] = None,
) -> int:
    """Write all rows as JSON lines, which every command that reads feedback takes."""
    from penstock.workloads.language.feedback import BadRows, rows_of

    bad = BadRows()
    with _lines_to(output, place) as file:
        for where, row in rows_of(place, part):
            try:
                file.write(_line(row))
            except (TypeError, ValueError) as error:
                bad.add(where, str(error))
    _report(bad)
    return EXIT_OK


def _line(row: Any) -> str:
    if isinstance(row, ValueError):
        raise row
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


# ---- Answers.


@command(rlhf_commands)
def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of language models that has ended.")],
    prompts: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="What to answer; may be repeated.")
    ],
    count: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most; default: as in training.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The most likely tokens; default: drawn as in training.")
    ] = False,
    assignments: Assignments = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Have the final language model of a run answer."""
    from penstock.config.service_settings import local_settings

    with needs_rlhf():
        from penstock.workloads.language.settings import as_configuration_error
        from penstock.workloads.plugin.serving import read_final
        from penstock.workloads.rlhf.artefacts import generate as answers_of
    with as_configuration_error(str(run), ValueError):
        final = read_final(run)
    if final.specification.workload != "rlhf":
        raise ConfigurationError(
            f"{run}: is a run of workload {final.specification.workload!r}, which has no language model; "
            "say `penstock evaluate`"
        )
    answers = answers_of(
        final.specification,
        final.blob,
        local_settings(run, tuple(assignments or ()), trust=trust).actor,
        [prompt for prompt in prompts for _ in range(count)],
        tokens=tokens,
        seed=seed,
        deterministic=deterministic,
    )
    for answer in answers:
        line = json.dumps(asdict(answer)) if as_json else f"{answer.prompt} → {answer.response}"
        sys.stdout.write(f"{line}\n")
    return EXIT_OK


# ---- Reward models.

rlhf_commands.add_typer(reward_commands, name="reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of `penstock rlhf reward train`."""

    feedback: Annotated[
        str, typer.Argument(help="JSON lines, Parquet, a dataset's folder, or a registry's URL.")
    ]
    model: Annotated[str, typer.Option(help="Base model: a folder, or a name on the hub.")]
    out: Annotated[Path, typer.Option(help="Folder to write to.")]
    scale: Annotated[str, typer.Option(help="Of the scores: thumbs, stars, percent, LOW:HIGH, or none.")] = (
        "none"
    )
    key: Annotated[str | None, typer.Option(help="Take rows that rate this.")] = None
    part: Part = None
    columns: Columns = None
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="NAME=SCALE",
            help="Something that rows rate, by their key; may be repeated, for one model of several heads.",
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="NAME=NUMBER", help="Of a head in the reward, default 1; may be repeated."
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            help="Scored rows like FEEDBACK's over which mean and std are taken; default: what was trained "
            "on."
        ),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a training that was interrupted.")] = (
        False
    )
    device: Annotated[
        str | None, typer.Option(help="cpu, or a GPU where there is one (default).", callback=_device)
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="epochs, batch, learning_rate, rank, lora, …; may be repeated."
        ),
    ] = None
    as_json: AsJson = False


@reward_commands.command()
@unfolded
def train(options: TrainingOptions) -> None:
    """Train a reward model on scores or pairs. Ctrl-C writes a checkpoint; --resume continues from it.

    With --head it learns several things at once, each as 0 to 1, and pairs in addition (docs/chat.md).
    """
    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(lambda lifecycle: train_model(lifecycle, options), "reward"))


@reward_commands.command()
@unfolded
def serve(
    model: Annotated[Path, typer.Argument(help="Folder of a reward model.")],
    listen: Listen = "127.0.0.1:50053",
    base: Base = None,
    device: Device = "cpu",
    *,
    foreground: SecuredForeground,
) -> None:
    """Serve a reward model's scores over gRPC."""

    def body(lifecycle: "Lifecycle", settings: "Settings") -> int:
        with needs_rlhf():
            from penstock.workloads.language.reward.reward_service import main
            from penstock.workloads.language.settings import quieten

            quieten()
            return main(lifecycle, settings, folder=model, base=base, device=device, listen=listen)

    foreground.run("reward", body)


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Return `OURS=THEIRS` texts as a mapping; raises ConfigurationError."""
    columns = dict[str, str]()
    for text in texts:
        ours, _, theirs = text.partition("=")
        if not (ours and theirs):
            raise ConfigurationError(f"--column {text!r}: write OURS=THEIRS, such as score=helpfulness")
        columns[ours] = theirs
    return columns


# ---- Training.


def train_model(lifecycle: "Lifecycle", options: TrainingOptions) -> int:
    of_heads = bool(options.heads or options.weights)
    if of_heads:
        one_head = {"--scale": options.scale != "none", "--key": options.key is not None}
        one_head |= {"--column": bool(options.columns), "--reference": options.reference is not None}
        one_head |= {"--resume": options.resume}
        if name := next((name for name, is_given in one_head.items() if is_given), None):
            raise ConfigurationError(f"{name}: is for a model of one head; leave it out with --head")
    from penstock.runtime.retry import Interrupted

    with needs_rlhf():
        from penstock.workloads.language.cached_generation import device_of
        from penstock.workloads.language.feedback import Source, scale_of
        from penstock.workloads.language.reward.heads import parse_heads, parse_weights
        from penstock.workloads.language.reward.training import Order, train
        from penstock.workloads.language.settings import quieten, training_settings
    quieten()
    scale, columns = scale_of(options.scale, "--"), parse_columns(options.columns or ())
    reference = options.reference
    order = Order(
        source=Source(
            place=options.feedback, scale=scale, part=options.part, key=options.key, columns=columns
        ),
        base=options.model,
        out=options.out,
        settings=training_settings(options.assignments or ()),
        reference=None if reference is None else Source(place=reference, scale=scale, columns=columns),
        resume=options.resume,
        device=device_of(options.device or "cpu") if of_heads else options.device,
        heads=parse_heads(options.heads or ()) if of_heads else (),
        weights=parse_weights(options.weights or ()),
    )
    try:
        results = train(order, lifecycle.draining)
    except Interrupted:
        if of_heads:
            sys.stderr.write(f"interrupted: nothing was written to {options.out}; start again\n")
        return EXIT_OK
    lines = (_heads_lines if of_heads else _lines)(options.out, results)
    sys.stdout.write(json.dumps(results) + "\n" if options.as_json else "\n".join(lines) + "\n")
    return EXIT_OK


def _lines(out: Path, results: dict[str, Any]) -> Sequence[str]:
    from penstock.workloads.language.reward.heads import doubt

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

PAGE: Final = 256
"""Rows that are scored at once."""


@command(reward_commands)
def score(
    place: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a reward model, grpc://HOST:PORT, http(s)://…, or module:function.",
        ),
    ],
    file: Annotated[
        str, typer.Argument(help="Rows with `prompt` and `response`, or `chosen` and `rejected`.")
    ],
    output: Output = None,
    part: Part = None,
    columns: Columns = None,
    base: Base = None,
    device: Device = "cpu",
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> int:
    """Score responses: a JSON object per row of FILE, with `where` and `reward`."""
    from penstock.config.credentials import credentials, http_headers
    from penstock.config.service_settings import service_settings

    with needs_rlhf():
        from penstock.workloads.language.reward.reward_model import open_source
        from penstock.workloads.language.reward.reward_source import RewardError
        from penstock.workloads.language.settings import quieten
    quieten()
    with _lines_to(output, file) as out:
        settings = service_settings(config, tuple(assignments or ()))
        source = open_source(
            place,
            credentials=credentials(settings.security),
            headers=http_headers(settings.security),
            base=base,
            device=device,
        )
        with closing(source):
            try:
                for line in _scored(source, file, part, parse_columns(columns or ())):
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
            except RewardError as error:
                raise Fatal(str(error)) from error
    return EXIT_OK


def _scored(
    source: "RewardSource", file: str, part: str | None, columns: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    from penstock.workloads.language.feedback import BadRows, made_of, rows_of

    bad, count = BadRows(), 0
    rows = rows_of(file, part)
    while page := list(islice(rows, PAGE)):
        samples = [one for found in made_of(page, bad, partial(_samples_of, columns)) for one in found]
        rewards = source.score([sample for _, sample in samples])
        for (label, _), value in zip(samples, rewards.values, strict=True):
            yield {**label, "reward": value, "model": rewards.by.name, "sha256": rewards.by.sha256}
        count += len(samples)
    _report(bad)
    if not count:
        raise ConfigurationError(f"{file}: no row can be scored")


def _samples_of(columns: Mapping[str, str], where: str, row: Any) -> "list[tuple[dict[str, Any], Sample]]":
    """Return the samples of a row, its response or both of its pair, with their labels; raises ValueError."""
    from penstock.workloads.language.feedback import is_pair, named, present, response_of
    from penstock.workloads.language.prompt import parse_prompt
    from penstock.workloads.language.reward.reward_source import Sample

    row = named(row, columns)
    prompt = parse_prompt(present(row, "prompt"))
    names = ("chosen", "rejected") if is_pair(row) else ("response",)
    return [
        ({"where": where, "of": name}, Sample(prompt=prompt, response=response_of(row, name)))
        for name in names
    ]
