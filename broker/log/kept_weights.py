"""The weights in Redis of versions that the registry keeps, as the learner holds them there.

`keep` names them all; what is not named goes, unless it is one of the newest two or being evaluated.
`restore` puts bytes back that Redis does not hold, `draw` a number for old content, and neither moves the
pointer that actors follow: training does not notice. Every write carries the lease's epoch, as in
`learner_log`.
"""

from collections.abc import Collection

from broker.log.learner_calls import LearnerCalls
from broker.log.log_memory import LogMemory
from penstock.wire.limits import WEIGHT_CHUNK_BYTES
from penstock.wire.messages import Publication


class KeptWeights:
    """`LearnerLog.kept` is one. Raises Refused(FENCED or NOT_READY) and Fatal as that does."""

    def __init__(self, calls: LearnerCalls, memory: LogMemory) -> None:
        self._calls = calls
        self._memory = memory

    def keep(self, versions: Collection[int], *, highest: int, traffic_revision: int) -> tuple[int, ...]:
        """Hold the bytes of exactly these versions; those of them that are not there, oldest first.

        highest: of all registered numbers: none up to it is drawn again.
        """
        reply = self._calls.fenced("keep_versions", traffic_revision, highest, *sorted(versions))
        self._memory.raise_to(version=highest)
        return tuple(int(version) for version in reply[1:])

    def restore(self, publication: Publication, blob: bytes) -> None:
        """Put the bytes of a kept version back; nothing happens when it is kept no longer, or is there."""
        version, pieces = publication.version, chunks(blob)
        self._calls.fenced("stage_version", version, len(pieces))
        for index, chunk in enumerate(pieces):
            self._calls.fenced("store_chunk", version, index, chunk)
        self._calls.fenced(
            "restore_version", version, publication.update, publication.sha256, len(blob), len(pieces)
        )

    def draw(self, blob: bytes) -> int:
        """A number that was never drawn before, for these bytes; `keep` it before it is restored."""
        version = int(self._calls.fenced("allocate_version", len(chunks(blob)))[1])
        self._memory.raise_to(version=version)
        return version


def chunks(blob: bytes) -> list[bytes]:
    """The bytes as Redis keeps them."""
    return [blob[at : at + WEIGHT_CHUNK_BYTES] for at in range(0, len(blob), WEIGHT_CHUNK_BYTES)]
