"""Reads a recording: its maker, and its fragments by their entries in the index.

Its content is not trusted: every frame is checked against its checksum, every fragment against the schema of
the recording, and each fault is an error that names file and offset.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.config.settings import ConfigurationError
from penstock.learner.feed.payloads import check_meaning
from penstock.learner.feed.recorded_event import RecordedEvent
from penstock.learner.recording.recording_index import (
    DESCRIPTION,
    FORMAT,
    FrameEntry,
    Kind,
    Torn,
    find_entries,
    frames_file,
    read_frame,
)
from penstock.protocol import fragment as wire
from penstock.protocol.fragment import Fragment, FragmentHeader
from penstock.protocol.schema import Ranges
from penstock.protocol.spaces import Dict
from penstock.protocol.specification import RunSpecification
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal

Loaded = tuple[FragmentHeader, Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Fragments that were consumed as one batch, in its order. entry: of the frame that records it."""

    entry: FrameEntry
    fragments: tuple[FrameEntry, ...]


class Recording:
    """Reads a recording that is not being written; raises ConfigurationError for a folder that holds none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            description = json.loads((folder / DESCRIPTION).read_bytes())
            known = description["format"] == FORMAT
            encoded = base64.b64decode(description["specification"])
            self.specification = RunSpecification.decode(encoded)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{folder}: holds no {DESCRIPTION}, so no recording; `learner.record` or `penstock "
                "record` makes one"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{folder / DESCRIPTION}: cannot be read: {error}") from error
        if not known:
            raise ConfigurationError(f"{folder / DESCRIPTION}: format {description['format']}, not {FORMAT}")
        self._entries = find_entries(folder)

    @cached_property
    def fragments(self) -> tuple[FrameEntry, ...]:
        """Return the entries of all fragments, in order."""
        return tuple(entry for entry in self._entries if entry.kind == Kind.FRAGMENT)

    @cached_property
    def entries(self) -> tuple["RecordedBatch | RecordedEvent", ...]:
        """Return batches and events in the order in which a learner met them."""
        found: list[RecordedBatch | RecordedEvent] = []
        since: list[FrameEntry] = []
        for entry in self._entries:
            if entry.kind == Kind.FRAGMENT:
                since.append(entry)
            elif entry.kind == Kind.EVENT:
                found.append(_event(entry))
            else:
                found.append(RecordedBatch(entry, tuple(since)))
                since = []
        return tuple(found)

    @property
    def batches(self) -> tuple[RecordedBatch, ...]:
        """Return the batches that a learner consumed; () where the recording was made without one."""
        return tuple(one for one in self.entries if isinstance(one, RecordedBatch))

    @cached_property
    def _ranges(self) -> Ranges:
        """Those of what it was recorded from; what its policy remembered is only finite."""
        told = self.specification
        return Ranges.of_run(told.observation_space, told.action_space, Dict(()))

    def check_schema(self, schema_id: str) -> None:
        """Raise ConfigurationError unless its fragments are those of a run with that schema."""
        if self.specification.schema.schema_id != schema_id:
            raise ConfigurationError(
                f"{self.folder}: recorded from {self.specification.run!r} with observations "
                f"{self.specification.observation_space} and actions {self.specification.action_space}; "
                "this run has others: name the environment that it was recorded in"
            )

    def load(self, entries: Sequence[FrameEntry]) -> list[Loaded]:
        """Return checked fragments; raises Fatal for one that is damaged or does not follow the schema."""
        return [self._open(entry) for entry in entries]

    def _open(self, entry: FrameEntry) -> Loaded:
        path = frames_file(self.folder, entry.file)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                frame = read_frame(file)
            if frame is None:
                raise Torn("the file ends before it")
            fragment = Fragment(wire.parse_header(frame.head), frame.body)
            wire.check(fragment, self.specification.schema, self.specification.run)
            arrays = check_meaning(fragment.header, fragment.arrays(), self._ranges)
        except (ValueError, OSError) as error:
            raise Fatal(f"{path}: the fragment at {entry.offset} cannot be used: {error}") from error
        return fragment.header, arrays


def _event(entry: FrameEntry) -> RecordedEvent:
    if entry.action not in ("checkpoint", "restore"):
        raise Fatal(f"the event at {entry.offset} of file {entry.file} is {entry.action!r}, which is unknown")
    return RecordedEvent("restore" if entry.action == "restore" else "checkpoint", entry.name, entry.command)
