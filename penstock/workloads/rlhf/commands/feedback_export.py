"""`penstock rlhf feedback export`: the rows of a place, as JSON lines."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.output_file import output_file
from penstock.workloads.language.feedback.examples import BadRows
from penstock.workloads.language.feedback.feedback_places import rows_of


def main(place: str, output: Path | None, part: str | None) -> int:
    """Write the rows; what is none is counted, and named on stderr. Raises ConfigurationError, OSError."""
    if output is not None and output.exists() and Path(place).exists() and output.samefile(place):
        raise ConfigurationError(f"--output {output}: is the file that is read; choose another name")
    bad = BadRows()
    with ExitStack() as stack:
        file = sys.stdout if output is None else stack.enter_context(output_file(output))
        for where, row in rows_of(place, part):
            try:
                file.write(_line(row))
            except (TypeError, ValueError) as error:
                bad.add(where, str(error))
    for line in bad.lines():
        sys.stderr.write(f"bad row: {line}\n")
    return EXIT_OK


def _line(row: Any) -> str:
    """Return a row as a line; raises TypeError and ValueError for what JSON cannot say."""
    if isinstance(row, ValueError):
        raise row
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
