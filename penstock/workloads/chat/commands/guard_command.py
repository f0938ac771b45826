"""`penstock chat guard`: the classifier trained and measured, texts checked."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.workloads.language.guard import (
    BUILT_IN,
    Direction,
    Guard,
    Share,
    load_classifier,
    packaged_rows,
    read_rows,
    read_rules,
    train_guard,
)


def train(output: Path, rows: Path | None, *, threshold: float, as_json: bool) -> int:
    texts = packaged_rows() if rows is None else read_rows(rows)
    try:
        found = train_guard(texts, threshold=threshold)
    except ValueError as error:
        raise ConfigurationError(f"--rows {rows}: {error}") from error
    try:
        found.classifier.save(output)
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}") from error
    measures = {"recall": found.recall, "false_alarms": found.false_alarms}
    if as_json:
        told = {
            name: {"count": one.count, "of": one.of, "interval": one.interval()}
            for name, one in measures.items()
        }
        sys.stdout.write(json.dumps({"texts": len(texts), "threshold": threshold, **told}) + "\n")
    else:
        lines = [f"{output}: trained on {len(texts)} texts", *map(_line, measures, measures.values())]
        sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_OK


def check(file: str, classifier: Path | None, rules: Path | None, direction: str) -> int:
    try:
        whose = Direction(direction)
    except ValueError as error:
        raise ConfigurationError(f"--direction {direction!r}: use input or output") from error
    own = () if rules is None else read_rules(rules, "--rules")
    judge = None if classifier is None else load_classifier(classifier, "--classifier")
    guard = Guard((*BUILT_IN, *own), judge)
    is_any_blocked = False
    for text in _texts(file):
        verdict = guard.check(text, whose)
        is_any_blocked |= verdict.is_blocked
        line = {"text": text, "blocked": verdict.is_blocked, "by": verdict.by}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return EXIT_FAILED if is_any_blocked else EXIT_OK


def _texts(file: str) -> Iterator[str]:
    if file == "-":
        yield from _lines(sys.stdin)
        return
    try:
        with Path(file).open() as opened:
            yield from _lines(opened)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from error


def _lines(opened: Iterable[str]) -> Iterator[str]:
    return (line.rstrip("\n") for line in opened if line.strip())


def _line(name: str, one: Share) -> str:
    low, high = one.interval()
    share = one.count / one.of if one.of else 0.0
    return (
        f"{name.replace('_', ' ')}: {one.count} of {one.of} held out, {share:.2f} ({low:.2f} to {high:.2f})"
    )
