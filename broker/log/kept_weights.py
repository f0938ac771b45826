"""The learner's side of weights in Redis whose versions the registry keeps.

`keep` names all of them; any other version is removed, unless it is one of the newest two or being
evaluated. `restore` puts bytes back that Redis does not hold and `draw` allocates a number for old content;
neither moves the pointer that actors follow, so training is not affected. Every write carries the lease's
epoch, as in `learner_log`.
"""

from collections.abc import Collection

from penstock.broker.log.learner_calls import LearnerCalls
from penstock.broker.log.log_memory import LogMemory
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication


class KeptWeights:
    """Holds the bytes of kept versions in Redis; `LearnerLog.kept` is one.

    Its methods raise Refused(FENCED or NOT_READY) and Fatal as those of `LearnerLog` do.
    """

    def __init__(self, calls: LearnerCalls, memory: LogMemory) -> None:
        self._calls = calls
        self._memory = memory

    def keep(self, versions: Collection[int], *, highest: int, traffic_revision: int) -> tuple[int, ...]:
        """Hold the bytes of exactly these versions; returns those whose bytes are missing, oldest first.

        Args:
            versions: versions that the registry keeps.
            highest: highest of all registered numbers; no number up to it is drawn again.
            traffic_revision: revision of the policy's traffic, for those who follow it.
        """
        reply = self._calls.fenced("keep_versions", traffic_revision, highest, *sorted(versions))
        self._memory.raise_to(version=highest)
        return tuple(int(version) for version in reply[1:])

    def restore(self, publication: Publication, blob: bytes) -> None:
        """Put the bytes of a kept version back.

        publication: which version, with its digest. blob: its weights, as safetensors. Nothing is done when
        it is no longer kept or its bytes are there.
        """
        version, pieces = publication.version, chunks(blob)
        self._calls.fenced("stage_version", version, len(pieces))
        for index, chunk in enumerate(pieces):
            self._calls.fenced("store_chunk", version, index, chunk)
        self._calls.fenced(
            "restore_version", version, publication.update, publication.sha256, len(blob), len(pieces)
        )

    def draw(self, blob: bytes) -> int:
        """Allocate a version number that was never used before for these bytes.

        `keep` it before it is restored.
        """
        version = int(self._calls.fenced("allocate_version", len(chunks(blob)))[1])
        self._memory.raise_to(version=version)
        return version


def chunks(blob: bytes) -> list[bytes]:
    """Return the bytes in the chunks in which Redis keeps them."""
    return [blob[at : at + WEIGHT_CHUNK_BYTES] for at in range(0, len(blob), WEIGHT_CHUNK_BYTES)]
