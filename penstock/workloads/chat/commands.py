"""`penstock chat`: the base model of a chat, filtered ratings, guardrails, and the loop."""

import getpass
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.foreground import AsJson, command, unfolded

if TYPE_CHECKING:
    from penstock.runtime.lifecycle import Lifecycle

chat_commands = typer.Typer(help="Chat: its base, ratings, guardrails, its loop.", no_args_is_help=True)
guard_commands = typer.Typer(help="Guardrails: train their classifier, check texts.", no_args_is_help=True)
loop_commands = typer.Typer(
    help="Learn from ratings: run, status, weigh, pause, resume, abandon.", no_args_is_help=True
)
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
        return train_base(lifecycle, files, out, model=model, assignments=assignments or (), as_json=as_json)

    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(body, "pretrain"))


def train_base(
    lifecycle: "Lifecycle",
    files: Sequence[Path],
    out: Path,
    *,
    model: str | None,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    try:
        from penstock.workloads.language.pretraining.tiny_models import pretrain_base, pretraining_settings
        from penstock.workloads.language.settings import quieten
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed: a chat needs pip install 'penstock-rl[rlhf]'"
        ) from error
    from penstock.runtime.retry import Interrupted

    quieten()
    settings = pretraining_settings(assignments)
    try:
        result = pretrain_base(files, out, settings, model=model, stop=lifecycle.draining)
    except Interrupted:
        sys.stderr.write(f"interrupted: nothing was written to {out}; start again\n")
        return EXIT_OK
    _print(json.dumps(result) if as_json else "\n".join(_base_lines(out, result)))
    return EXIT_OK


def _base_lines(out: Path, result: dict[str, Any]) -> list[str]:
    measured = "nothing was held out"
    if result["loss"] is not None:
        measured = (
            f"held out: {result['held_out']}, loss {result['loss_before']:.3g} before, {result['loss']:.3g} "
            f"after, perplexity {result['perplexity']:.3g}"
        )
    return [
        f"{out}: learned from {result['conversations']} conversations",
        measured,
        f"{result['bad']} conversations could not be used",
        *result["bad_shown"],
    ]


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@command(chat_commands)
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
                "Folder of a reward model of several heads, whose `thumb` people are compared with; default: "
                "what others say of the same response."
            )
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Folder or hub name of the judge's base model, where it has moved.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the ratings that count, and report each one dropped, its reason and its rater."""
    from penstock.workloads.chat.ratings import RatingRules, write_believed

    rules = RatingRules(daily_cap=daily_cap, false_alarms=false_alarms)
    lines = write_believed(
        file, output, rules, part=part, deleted=deleted, judge=judge, base=base, as_json=as_json
    )
    _print("\n".join(lines))
    return EXIT_OK


# ---- Guardrails: the classifier trained and measured, texts checked.


@command(guard_commands)
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
) -> int:
    """Train the classifier of what people say; tell its recall and false alarms on texts held out."""
    from penstock.workloads.language.guard import packaged_rows, read_rows, train_guard

    texts = packaged_rows() if rows is None else read_rows(rows)
    try:
        found = train_guard(texts, threshold=threshold)
    except ValueError as error:
        raise ConfigurationError(f"--rows {rows}: {error}") from error
    try:
        found.classifier.save(output)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}") from error
    shares = {"recall": found.recall, "false_alarms": found.false_alarms}
    if as_json:
        told = {
            name: {"count": one.count, "of": one.of, "interval": one.interval()}
            for name, one in shares.items()
        }
        _print(json.dumps({"texts": len(texts), "threshold": threshold, **told}))
        return EXIT_OK
    _print(f"{output}: trained on {len(texts)} texts")
    for name, one in shares.items():
        low, high = one.interval()
        share = one.count / one.of if one.of else 0.0
        held_out = f"{one.count} of {one.of} held out, {share:.2f} ({low:.2f} to {high:.2f})"
        _print(f"{name.replace('_', ' ')}: {held_out}")
    return EXIT_OK


@command(guard_commands)
def check(
    file: Annotated[str, typer.Argument(help="Texts, one a line; - is stdin.")],
    classifier: Annotated[
        Path | None, typer.Option(help="Of `penstock chat guard train`; default: rules alone.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="TOML file of rules in addition to the built-in ones.")
    ] = None,
    direction: Annotated[
        str, typer.Option(help="input: what people say; output: what a model says.")
    ] = "input",
) -> int:
    """Print an object a line: whether the text is blocked, and by what. Exit 1 where any is."""
    from penstock.workloads.language.guard import BUILT_IN, Direction, Guard, load_classifier, read_rules

    try:
        checked = Direction(direction)
    except ValueError as error:
        raise ConfigurationError(f"--direction {direction!r}: use input or output") from error
    own = () if rules is None else read_rules(rules, "--rules")
    guard = Guard(
        (*BUILT_IN, *own), None if classifier is None else load_classifier(classifier, "--classifier")
    )
    is_any_blocked = False
    for text in _texts(file):
        verdict = guard.check(text, checked)
        is_any_blocked |= verdict.is_blocked
        line = {"text": text, "blocked": verdict.is_blocked, "by": verdict.by}
        _print(json.dumps(line, ensure_ascii=False))
    return EXIT_FAILED if is_any_blocked else EXIT_OK


def _texts(file: str) -> Iterator[str]:
    """Yield the lines of a file, or of stdin for "-", that are not empty."""
    try:
        with nullcontext(sys.stdin) if file == "-" else Path(file).open() as texts:
            yield from (line.rstrip("\n") for line in texts if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error


# ---- The loop: train a chat from its ratings, show its state, pause it.

_MISUSED: Any = typer.BadParameter.__mro__[1]
"""UsageError, of click or of the copy that typer has."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run that answers people.")]
Reason = Annotated[str, typer.Option("--reason", help="Why.")]
_WEIGHTS: Any = typer.Option(
    "--weight", metavar="NAME=NUMBER", help="Of a head in the reward; may be repeated."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of `penstock chat loop run`."""

    labels: Annotated[int, typer.Option(help="New ratings that count, by which a round begins.")] = 200
    share: Annotated[float, typer.Option(help="Share of the people who get a canary.")] = 0.5
    patience: Annotated[
        int, typer.Option(help="Ratings after which a canary that nothing is proved of is withdrawn.")
    ] = 2000
    least_auc: Annotated[
        float,
        typer.Option(
            help="Least area under the curve of the reward model on ratings held out: 0.5 is chance, 0 any."
        ),
    ] = 0.55
    any_version: Annotated[
        bool,
        typer.Option(
            "--any-version",
            help="Also try versions that their own evaluation does not find better than the one before.",
        ),
    ] = False
    heads: Annotated[
        tuple[str, ...],
        typer.Option(
            "--head", metavar="NAME=SCALE", help="What people rate; default: what the page asks for."
        ),
    ] = ()
    weights: Annotated[tuple[str, ...], _WEIGHTS] = ()
    reward: Annotated[
        tuple[str, ...],
        typer.Option(metavar="KEY=VALUE", help="As `penstock rlhf reward train --set`; may be repeated."),
    ] = ()
    train: Annotated[
        tuple[str, ...],
        typer.Option(metavar="SECTION.KEY=VALUE", help="As `penstock train --set`; may be repeated."),
    ] = ()


@loop_commands.command()
@unfolded
def run(
    run: Run,
    options: LoopOptions,
    once: Annotated[bool, typer.Option("--once", help="End after one round.")] = False,
) -> None:
    """Train from new ratings, try the result as a canary, promote or withdraw it, and begin again."""

    def body(lifecycle: "Lifecycle") -> int:
        from penstock.config.run_folder import keep_private
        from penstock.workloads.chat.learning_loop import LearningLoop
        from penstock.workloads.chat.loop_state import LoopOrder
        from penstock.workloads.chat.step_process import read_run

        keep_private()
        order = LoopOrder(**asdict(options))
        LearningLoop(read_run(run), order, lifecycle.draining, once=once).go()
        return EXIT_OK

    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(body, "loop"))


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigurationError for options that `run` refuses."""
    started = typer.main.get_group(loop_commands).commands["run"]
    try:
        with started.make_context("run", ["RUN", *words]) as context:
            options: dict[str, Any] = {
                one.name: () if (value := context.params[one.name]) is None else value
                for one in fields(LoopOptions)
            }
    except _MISUSED as error:
        raise ConfigurationError(f"--loop: {error.format_message()}") from error
    from penstock.workloads.chat.loop_state import LoopOrder

    try:
        LoopOrder(**options)
    except ConfigurationError as error:
        raise ConfigurationError(f"--loop: {error}") from error


@command(loop_commands)
def status(run: Run, as_json: AsJson = False) -> int:
    """Show the loop's step, the progress of the canary's trial, and the outcomes of earlier rounds."""
    from penstock.registry.records import RegistryError
    from penstock.registry.registry import Registry
    from penstock.workloads.chat.loop_state import look_at_canaries, look_at_loop
    from penstock.workloads.chat.step_process import read_run

    served = read_run(run)
    try:
        with Registry.read(served.url) as registry:
            found = look_at_loop(run, registry, served.policy)
            canaries = look_at_canaries(registry, served.policy, served.settings.canary.false_alarm)
    except RegistryError as error:
        raise ConfigurationError(f"{run}: {error}") from error
    report = {"loop": found, "canaries": canaries}
    for line in [json.dumps(report)] if as_json else map(_one_line, _status_lines(report)):
        _print(line)
    return EXIT_OK


@command(loop_commands)
def weigh(run: Run, weights: Annotated[list[str], _WEIGHTS], reason: Reason) -> int:
    """Change the weights of heads in the reward, from the next reward model of the loop on."""
    from penstock.workloads.chat import loop_state
    from penstock.workloads.language.reward.heads import parse_weights

    every = loop_state.weigh(_loop_of(run), parse_weights(weights), _why(reason), getpass.getuser())
    _print(f"weights from the next reward model on: {loop_state.shown_weights(every)}")
    return EXIT_OK


@command(loop_commands)
def pause(run: Run, reason: Reason) -> int:
    """Have the loop wait: it trains and promotes nothing. Servers still withdraw a canary that is worse."""
    from penstock.workloads.chat import loop_state

    loop_state.pause(_loop_of(run), _why(reason), getpass.getuser())
    return EXIT_OK


@command(loop_commands)
def resume(run: Run) -> int:
    """Let the loop go on; a step that failed is tried again."""
    from penstock.workloads.chat import loop_state

    loop_state.resume(_loop_of(run))
    return EXIT_OK


@command(loop_commands)
def abandon(run: Run, reason: Reason) -> int:
    """Give up the current round: its canary is withdrawn, and the next round begins with new ratings."""
    from penstock.workloads.chat import loop_state

    number = loop_state.abandon(_loop_of(run), _why(reason), getpass.getuser())
    _print(f"round {number} is given up as soon as the loop looks: `penstock chat loop status`")
    return EXIT_OK


def _loop_of(run: Path) -> Path:
    from penstock.workloads.chat.loop_state import folder_of
    from penstock.workloads.chat.step_process import read_run

    read_run(run)
    return folder_of(run)


def _why(reason: str) -> str:
    from penstock.registry.records import check_text

    try:
        return check_text("--reason", reason)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _status_lines(report: dict[str, Any]) -> list[str]:
    from penstock.registry.canary import Verdict
    from penstock.workloads.chat.loop_state import shown_weights

    found, canaries = report["loop"], report["canaries"]
    trial = canaries["trial"]
    lines = [
        f"canaries so far: {canaries['tried']}, each with a false alarm rate of {canaries['falseAlarm']:g}"
    ]
    if trial is not None:
        verdict = "no verdict yet" if trial["verdict"] == Verdict.GO_ON else trial["verdict"]
        lines.append(
            f"version {trial['version']} is on trial: {verdict}; {trial['canaryPeople']} people "
            f"have it, {trial['activePeople']} the active version; of the evidence for a verdict there is "
            f"{trial['better']:.0%} that it is better, {trial['worse']:.0%} that it is worse"
            + ("; people rate the two at different rates, so it is not called better" * trial["ratesDiffer"])
        )
    if found is None:
        return ["the loop was never started here", *lines]
    return [
        *_standing_lines(found),
        *([f"waits: {found['note']}"] if found["note"] else []),
        f"new ratings: {found['newRatings']} of {found['labelsWanted']} for the next round",
        *lines,
        f"weights from the next reward model on: {shown_weights(found['weights'])}",
        *_judge_lines(found["judge"]),
        *(map(_past_line, found["past"])),
    ]


def _one_line(text: str) -> str:
    """Return a line with escapes for characters that could break it into several, or colour it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _standing_lines(found: dict[str, Any]) -> list[str]:
    paused, failure, abandoned = found["paused"], found["failure"], found["abandoned"]
    lines = [f"round {found['round']}: {found['step']}" + ("" if paused is None else ", paused")]
    if failure:
        lines.append(
            f"failed {found['tries']} times: {failure}" if found["tries"] > 1 else f"failed: {failure}"
        )
    if abandoned is not None:
        lines.append(f"given up by {abandoned['by']}, once the loop looks: {abandoned['reason']}")
    if paused is not None and paused["until_s"] is not None:
        lines.append(f"tried again at {_time(paused['until_s'])}")
    elif paused is not None:
        lines.append(f"paused by {paused['by']}: {paused['reason']}")
    if failure:
        lines.append(
            "`penstock chat loop resume` tries it at once, `penstock chat loop abandon` gives the round up"
        )
    return lines


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _judge_lines(judge: dict[str, Any] | None) -> list[str]:
    if judge is None:
        return []
    return [
        f"reward model of round {judge['round']}, {one['head']} of weight {one['weight']:g}, on "
        f"{one['ratings']} ratings held out: area under the curve {_number(one['auc'])}, squared error "
        f"{_number(one['squaredError'])}, calibration error {_number(one['calibrationError'])}"
        for one in judge["heads"]
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _past_line(one: dict[str, Any]) -> str:
    ended = _time(one["ended_s"])
    version = "" if one["version"] is None else f", version {one['version']}"
    auc = "" if one["auc"] is None else f", area under the curve {one['auc']:.2f}"
    what = f"round {one['number']} {one['outcome']} at {ended}: {one['labels']} labels"
    return f"{what}{version}{auc}; {one['why']}"
