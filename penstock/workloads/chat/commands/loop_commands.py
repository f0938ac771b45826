"""`penstock chat loop`: have a chat learn from its ratings, see how far that is, and have it wait."""

import getpass
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import AsJson, finish

if TYPE_CHECKING:
    from penstock.runtime.lifecycle import Lifecycle
    from penstock.workloads.chat.loop.loop_state import LoopOrder

loop_commands = typer.Typer(
    help="Learn from ratings: run, status, weigh, pause, resume, abandon.", no_args_is_help=True
)

_MISUSED: Any = typer.BadParameter.__mro__[1]
"""UsageError, of click or of the copy that typer has."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run that answers people.")]
Reason = Annotated[str, typer.Option("--reason", help="Why.")]
_WEIGHTS: Any = typer.Option(
    "--weight", metavar="NAME=NUMBER", help="Of a head in the reward; may be repeated."
)


@loop_commands.command()
def run(
    run: Run,
    labels: Annotated[int, typer.Option(help="New ratings that count, by which a round begins.")] = 200,
    once: Annotated[bool, typer.Option("--once", help="End after one round.")] = False,
    share: Annotated[float, typer.Option(help="Share of the people who get a canary.")] = 0.5,
    patience: Annotated[
        int, typer.Option(help="Ratings after which a canary that nothing is proved of is withdrawn.")
    ] = 2000,
    least_auc: Annotated[
        float,
        typer.Option(
            help="Least area under the curve of the reward model on ratings held out: 0.5 is chance, 0 any."
        ),
    ] = 0.55,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--head", metavar="NAME=SCALE", help="What people rate; default: what the page asks for."
        ),
    ] = None,
    weights: Annotated[list[str] | None, _WEIGHTS] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="As `penstock rlhf reward train --set`; may be repeated."),
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=VALUE", help="As `penstock train --set`; may be repeated."),
    ] = None,
) -> None:
    """Train from new ratings, try what comes of it as a canary, promote or withdraw it, and begin again."""

    def body(lifecycle: "Lifecycle") -> int:
        from penstock.config.run_folder import keep_private
        from penstock.workloads.chat.loop.learning_loop import LearningLoop
        from penstock.workloads.chat.loop.step_process import read_run

        keep_private()
        order = _order(
            labels=labels, share=share, patience=patience, least_auc=least_auc, heads=heads, weights=weights,
            reward=reward, train=train,
        )  # fmt: skip
        LearningLoop(read_run(run), order, lifecycle.draining, once=once).go()
        return EXIT_OK

    from penstock.runtime.lifecycle import leave, run_service

    leave(run_service(body, "loop"))


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigurationError for options that `run` would refuse when it begins."""
    group = typer.main.get_group(loop_commands)
    command = group.commands["run"]
    try:
        with command.make_context("run", ["RUN", *words]) as context:
            said = dict(context.params)
    except _MISUSED as error:
        raise ConfigurationError(f"--loop: {error.format_message()}") from error
    try:
        _order(**{name: value for name, value in said.items() if name not in ("run", "once")})
    except ConfigurationError as error:
        raise ConfigurationError(f"--loop: {error}") from error


def _order(**said: Any) -> "LoopOrder":
    """Return how the loop goes. said: options of `run` by name; None of a list: nothing."""
    from penstock.workloads.chat.loop.loop_state import LoopOrder

    lists = ("heads", "weights", "reward", "train")
    return LoopOrder(**{**said, **{name: tuple(said[name] or ()) for name in lists}})


@loop_commands.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """Tell which step the loop is at, how far the canary's trial is, and what became of rounds before."""

    def body() -> int:
        from penstock.registry.records import RegistryError
        from penstock.registry.registry import Registry
        from penstock.workloads.chat.loop.loop_view import look_at_canaries, look_at_loop
        from penstock.workloads.chat.loop.step_process import read_run

        served = read_run(run)
        try:
            with Registry.read(served.url) as registry:
                found = look_at_loop(run, registry, served.policy)
                canaries = look_at_canaries(registry, served.policy, served.settings.canary.false_alarm)
        except RegistryError as error:
            raise ConfigurationError(f"{run}: {error}") from error
        told = {"loop": found, "canaries": canaries}
        lines = [json.dumps(told)] if as_json else map(_one_line, _lines(told))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return EXIT_OK

    finish(body)


@loop_commands.command()
def weigh(run: Run, weights: Annotated[list[str], _WEIGHTS], reason: Reason) -> None:
    """Change what heads count in the reward, from the next reward model of the loop on."""

    def ask(folder: Path) -> None:
        from penstock.workloads.chat.loop import loop_state
        from penstock.workloads.language.reward.heads import parse_weights

        every = loop_state.weigh(folder, parse_weights(weights), _why(reason), getpass.getuser())
        sys.stdout.write(f"weights from the next reward model on: {loop_state.shown_weights(every)}\n")

    _ask_of_loop(run, ask)


@loop_commands.command()
def pause(run: Run, reason: Reason) -> None:
    """Have the loop wait: it trains and promotes nothing. Servers still withdraw a canary that is worse."""

    def ask(folder: Path) -> None:
        from penstock.workloads.chat.loop import loop_state

        loop_state.pause(folder, _why(reason), getpass.getuser())

    _ask_of_loop(run, ask)


@loop_commands.command()
def resume(run: Run) -> None:
    """Let the loop go on; a step that failed is tried again."""

    def ask(folder: Path) -> None:
        from penstock.workloads.chat.loop import loop_state

        loop_state.resume(folder)

    _ask_of_loop(run, ask)


@loop_commands.command()
def abandon(run: Run, reason: Reason) -> None:
    """Give up the round that goes on: its canary is withdrawn, and the next one begins by new ratings."""

    def ask(folder: Path) -> None:
        from penstock.workloads.chat.loop import loop_state

        number = loop_state.abandon(folder, _why(reason), getpass.getuser())
        sys.stdout.write(
            f"round {number} is given up as soon as the loop looks: `penstock chat loop status`\n"
        )

    _ask_of_loop(run, ask)


def _ask_of_loop(run: Path, ask: Callable[[Path], None]) -> None:
    def body() -> int:
        from penstock.workloads.chat.loop import loop_state
        from penstock.workloads.chat.loop.step_process import read_run

        read_run(run)
        ask(loop_state.folder_of(run))
        return EXIT_OK

    finish(body)


def _why(reason: str) -> str:
    from penstock.registry.records import check_text

    try:
        return check_text("--reason", reason)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _lines(told: dict[str, Any]) -> list[str]:
    from penstock.registry.canary import Verdict
    from penstock.workloads.chat.loop.loop_state import shown_weights

    found, canaries = told["loop"], told["canaries"]
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
    """Return a line in which nothing that people or a step wrote looks like a further one, or colours it."""
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
