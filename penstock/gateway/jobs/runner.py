"""What a gateway is handed to have jobs run; `launch` has the one that starts processes on this machine."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from penstock.gateway.jobs.job_records import Job, Outcome, Template


class Stage(Enum):
    """Says where a job is that a runner has and that has not ended."""

    NOT_BEGUN = "nothing of it was ever started"
    GOING_ON = "its processes live"


class CannotBegin(Exception):
    """Reports a job that cannot be started; the message is the cause that its callers read."""


class CannotLook(Exception):
    """Reports that a runner cannot know now where its jobs are; the message says why. Jobs go on."""


class Runner(Protocol):
    """Starts jobs, finds them again, and ends them. place: its name in the rows of jobs."""

    place: str

    def templates(self) -> Mapping[str, Template]:
        """Return the templates by name."""

    def hold(self) -> AbstractContextManager[bool]:
        """Hold the place, where no other gateway does: True inside the block, and its jobs are this one's."""

    def folder(self, job: str) -> Path:
        """Return the folder of a job, made where it is absent; raises OSError."""

    def begin(self, job: Job, settings: Mapping[str, Any]) -> None:
        """Start the processes of a job, unless they were ever started.

        settings: over its template and numbers, nested as in TOML. Raises CannotBegin, CannotLook, OSError.
        """

    def find(self, job: str) -> Stage | Outcome:
        """Return where a job is, also of one that another gateway started; raises CannotLook."""

    def stop(self, job: str) -> bool:
        """Ask the processes of a job to end; False: there are none yet that could be asked.

        Raises CannotLook.
        """

    def read_log(self, job: str, begin: int, most: int) -> bytes:
        """Return at most `most` bytes of a job's log from byte `begin` on; b"" where there are none yet.

        Raises OSError for one that cannot be read.
        """

    def heard(self, job: str) -> float:
        """Return when a job's run has last written to its log or its metrics, in Unix seconds; 0.0: never."""

    def read_curve(self, job: str) -> Mapping[str, list[Any]]:
        """Return the curve of a job's run as columns of equal length, thinned, oldest first.

        Raises OSError for one that cannot be read.
        """

    def estimate(
        self, template: str, numbers: Mapping[str, float], prepare: Callable[[Path], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the dry run of a job as JSON values; raises CannotBegin, CannotLook, OSError.

        prepare: writes into the folder that it is given, and returns settings as `begin` takes them.
        """
