"""What lies in the log under the entries that the feed has chosen: fetched, checked, made into a batch.

The feed decides from headers alone; this says what became of each entry's payload, and keeps what is good
until its batch is put together. With several ranks each does it for its own entries
(`penstock.learner.ranks.sharing`).
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol, Self

import torch

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.learner_records import LogEntry
from penstock.config.settings import Settings
from penstock.learner.batch import assemble, nothing
from penstock.learner.feed.fragment_check import check_meaning
from penstock.learner.feed.log_batch import reward_of
from penstock.learner.feed.upload import Staged, Upload, upload_to
from penstock.learner.ledger import DIGEST_BYTES
from penstock.protocol import fragment as wire
from penstock.protocol.header import FragmentHeader
from penstock.protocol.ranges import Ranges
from penstock.protocol.schema import FragmentSchema
from penstock.protocol.tensor import Array
from penstock.runtime.exit import Fatal

log = logging.getLogger(__name__)

Loaded = tuple[FragmentHeader, Mapping[str, Array]]


class State(IntEnum):
    """Of a payload."""

    GOOD = 1
    MISSING = 2
    INVALID = 3


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a payload.

    steps: valid ones of a good one. reward: sum over these. digest: first DIGEST_BYTES of its SHA-256, where
    that is taken. fragment: it and its header, where it was found in this process and is kept for the
    recording.
    """

    state: State
    steps: int = 0
    reward: float = 0.0
    digest: bytes = b""
    fragment: wire.Fragment | None = None


class Payloads(Protocol):
    """Used by the feed's thread."""

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """Return what became of each."""
        ...

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Good entries as this rank's batch, in this order; everything else that was kept is forgotten."""
        ...


class OwnPayloads:
    """`Payloads` of one process."""

    def __init__(
        self,
        learner_log: LearnerLog,
        *,
        run_name: str,
        schema: FragmentSchema,
        ranges: Ranges,
        upload: Upload,
        take_digests: bool = False,
        keep_fragments: bool = False,
    ) -> None:
        """take_digests: of every good payload, for the lineage. keep_fragments: for the recording."""
        self._log = learner_log
        self._run_name = run_name
        self._schema = schema
        self._ranges = ranges
        self._upload = upload
        self._take_digests = take_digests
        self._keep_fragments = keep_fragments
        self._loaded: dict[int, Loaded] = {}

    @classmethod
    def of_run(
        cls, learner_log: LearnerLog, settings: Settings, schema: FragmentSchema, ranges: Ranges,
        device: torch.device, *, keep_fragments: bool = False,
    ) -> Self:  # fmt: skip
        """Return the payloads of a run with these settings, on their way to `device`."""
        return cls(
            learner_log,
            run_name=settings.run,
            schema=schema,
            ranges=ranges,
            upload=upload_to(device),
            take_digests=settings.actor.ack_journal is not None,
            keep_fragments=keep_fragments,
        )

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """See `Payloads`."""
        payloads = (
            self._log.fetch([entry.number for entry in entries], [entry.size for entry in entries])
            if entries
            else []
        )
        return [
            Found(State.MISSING) if payload is None else self._open(entry, payload)
            for entry, payload in zip(entries, payloads, strict=True)
        ]

    def batch(self, entries: Sequence[LogEntry]) -> Staged:
        """Assemble the entries as `Payloads` says; a batch without columns for no entries.

        It fetches what was not checked here. Raises Fatal where the payload of an entry that was good is not
        good now.
        """
        lacking = [entry for entry in entries if entry.number not in self._loaded]
        for entry, found in zip(lacking, self.check(lacking), strict=True):
            if found.state is not State.GOOD:
                raise Fatal(f"log entry {entry.number} was good and is {found.state.name.lower()} now")
        loaded = [self._loaded[entry.number] for entry in entries] or [nothing(self._schema)]
        places = [(entry.number, entry.size) for entry in entries] or None
        self._loaded.clear()
        return self._upload.stage(partial(assemble, loaded, self._upload.device, places))

    def _open(self, entry: LogEntry, payload: bytes) -> Found:
        header = entry.header
        assert header is not None, "an entry without a header is never chosen"
        try:
            loaded = opened(header, payload, self._schema, self._ranges, self._run_name)
        except ValueError as error:
            words = {"number": entry.number, "why": str(error)}
            log.error("fragment dropped as invalid", extra=words)  # noqa: TRY400 - the text says it all
            return Found(State.INVALID)
        self._loaded[entry.number] = loaded
        arrays = loaded[1]
        return Found(
            State.GOOD,
            steps=int(arrays["valid"].sum()),
            reward=reward_of(arrays),
            digest=hashlib.sha256(payload).digest()[:DIGEST_BYTES] if self._take_digests else b"",
            fragment=wire.Fragment(header, payload) if self._keep_fragments else None,
        )


def opened(
    header: FragmentHeader, payload: bytes, schema: FragmentSchema, ranges: Ranges, run_name: str
) -> Loaded:
    """Return a fragment that can be trained on; raises ValueError that says why it cannot."""
    fragment = wire.Fragment(header, payload)
    wire.check(fragment, schema, run_name)
    return header, check_meaning(header, fragment.arrays(), ranges)
