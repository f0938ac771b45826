"""The one place where the header of a new fragment is built.

Rollouts (`fragment_builder`), policy servers (`penstock.actor.serving.episodes.segments`) and workloads with
generators of their own cut different arrays into the same kind of fragment: one span of weights over all of
its steps.
"""

import time
from dataclasses import dataclass

from penstock.protocol.header import FragmentHeader, Slot, WeightSpan
from penstock.protocol.messages import Publication
from penstock.protocol.schema import FragmentSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFields:
    """Holds what a header says beside the content of its fragment.

    session, sequence: 0 where the fragment gets both when it is sent.
    weights: the publication that all of its steps were generated with.
    round: the round of a lock-step run, else 0.
    """

    run: str
    session: int
    sequence: int
    weights: Publication
    round: int
    policy: str = "default"

    def header(
        self, schema: FragmentSchema, steps: int, slots: tuple[Slot, ...], attributes: bytes = b""
    ) -> FragmentHeader:
        """Return the header of a fragment that is created now, its table of tensors still empty.

        schema: the run's. steps: T, rows of the fragment. slots: N, the origin of each column.
        attributes: what the workload notes, at most `limits.MAX_ATTRIBUTES_BYTES`.
        """
        return FragmentHeader(
            run=self.run,
            session=self.session,
            sequence=self.sequence,
            schema_id=schema.schema_id,
            steps=steps,
            slots=slots,
            weights=(WeightSpan(0, 0, steps, self.weights.version, self.weights.update),),
            tensors=(),
            policy=self.policy,
            created_us=time.time_ns() // 1000,
            round=self.round,
            attributes=attributes,
        )
