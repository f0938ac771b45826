"""The files of a guard that a run names: read before it is trained, and again by its server."""

from pathlib import Path

from penstock.workloads.language.guard.guard_rules import Rule, read_rules
from penstock.workloads.language.guard.text_classifier import TextClassifier, load_classifier


def read_guard_files(rules: str, classifier: str) -> tuple[tuple[Rule, ...], TextClassifier | None]:
    """Return the rules and the classifier of a run's files; "" names none.

    Raises ConfigurationError for a file that cannot be used.
    """
    return (
        read_rules(Path(rules), "environment.kwargs.guard_rules") if rules else (),
        load_classifier(Path(classifier), "environment.kwargs.guard_classifier") if classifier else None,
    )
