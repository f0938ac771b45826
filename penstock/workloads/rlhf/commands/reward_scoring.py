"""`penstock rlhf reward score`: rows of a file with their rewards, as JSON lines."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.config.configuration_error import ConfigurationError, how_to_install
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.output_file import output_file

if TYPE_CHECKING:
    from penstock.workloads.language.reward.reward_source import RewardSource, Sample

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


def main(
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
