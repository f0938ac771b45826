"""Columns as fragments of one run: a column is an episode, and each slot numbers its own."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Fragment
from penstock.protocol.messages import Episode
from penstock.protocol.schema import FragmentSchema
from penstock.workloads.language.conversation.column import Column, column_tensors, weight_spans
from penstock.workloads.plugin.fragments import Ends, Episodes, HeaderFields, LearnerReward, make


class ColumnFragments:
    """Makes fragments of N columns and numbers the episodes of each slot."""

    def __init__(
        self, schema: FragmentSchema, slots: int, pad_id: int, reward: LearnerReward | None = None
    ) -> None:
        """Raise ConfigurationError for a schema with tensors that columns do not have."""
        self._schema, self._pad, self._reward = schema, pad_id, reward
        self._episodes = Episodes(slots)
        unknown = sorted(schema.by_name.keys() - column_tensors([Column(ids=(pad_id,))], pad_id).keys())
        if unknown:
            raise ConfigurationError(
                f"schema: tensors {unknown} are not made by a generator of language models"
            )

    def restart(self, slots: int) -> None:
        """For another session."""
        self._episodes = Episodes(slots)

    def cut(
        self, columns: Sequence[Column], fields: HeaderFields, attributes: bytes = b"", first_slot: int = 0
    ) -> tuple[Fragment, list[Episode]]:
        """The fragment of one column per slot, and the episodes that ended in it, with rewards as given.

        fields: its weights are those of a fragment in which nothing was sampled, and of the episodes.
        first_slot: number of the first column's slot; what one slot has sampled with never gets older.
        """
        tensors = column_tensors(columns, self._pad)
        slots = tuple(one._replace(slot_id=first_slot + one.slot_id) for one in self._episodes.slots())
        ends = Ends(tensors["final/slot"], tensors["final/step"])
        episodes = self._episodes.advance(
            tensors["reward"], tensors["valid"], tensors["terminated"], ends, fields.weights.version
        )
        if self._reward is not None:
            tensors["reward"] = self._reward(tensors)
        steps = len(tensors["reward"])
        header = fields.header(self._schema, steps, slots, attributes)
        if any(column.turns for column in columns):
            header = replace(header, weights=weight_spans(columns, steps))
        return make(header, tensors), [replace(one, slot_id=first_slot + one.slot_id) for one in episodes]
