"""Entries of the log that are read and not yet decided, oldest first; choosing a batch looks at each once.

    add → unseen ─ `choose`: its verdict → kept, with their running charge → `take`: a batch
                                         └ dropped by the verdict

A verdict depends on the learner's update count and on who is quarantined. While these stay as they are, an
entry that was kept is not judged again, so a batch of n fragments that arrive one at a time costs n verdicts.
"""

from collections import deque
from collections.abc import Callable, Collection

from penstock.broker.log.learner_records import LogEntry


class Pending:
    """Used by the feed's thread.

    judge: drops an entry under a reason of its own and returns False, or returns True.
    circumstances: what verdicts depend on; where it has changed, `choose` judges the kept entries again.
    """

    def __init__(self, judge: Callable[[LogEntry], bool], circumstances: Callable[[], object]) -> None:
        self._judge = judge
        self._circumstances = circumstances
        self._judged_under: object = None
        self._unseen: deque[LogEntry] = deque()
        self._kept: list[LogEntry] = []
        self._charge = 0

    def add(self, entry: LogEntry) -> None:
        """Append an entry that has a header."""
        self._unseen.append(entry)

    def choose(self, makes_batch: Callable[[int, int], bool], through: int | None = None) -> bool:
        """Keep entries until they make a batch; returns whether they do.

        makes_batch: given the count of the kept ones and the sum of their charges. through: no entry behind
        this one; None: any.
        """
        self._judge_again()
        if through is not None:
            self._put_back(through)
        while not self._is_enough(makes_batch) and self._has_unseen(through):
            entry = self._unseen.popleft()
            if self._judge(entry):
                self._keep(entry)
        return self._is_enough(makes_batch)

    def choose_round(self, number: int) -> list[LogEntry]:
        """Return all entries of lock-step rounds up to `number` that are kept, in order of the log."""
        self._judge_again()
        later: deque[LogEntry] = deque()
        for entry in self._unseen:
            if entry.round > number:
                later.append(entry)
            elif self._judge(entry):
                self._keep(entry)
        self._unseen = later
        return self.kept

    @property
    def charge(self) -> int:
        """Return the sum of the charges of the kept ones."""
        return self._charge

    @property
    def has_kept(self) -> bool:
        """Return whether any entry is kept."""
        return bool(self._kept)

    @property
    def kept(self) -> list[LogEntry]:
        """Return a copy of the entries that the next batch is made of."""
        return list(self._kept)

    def discard(self, numbers: Collection[int]) -> None:
        """Forget kept entries: they turned out not to be usable."""
        kept, self._kept, self._charge = self._kept, [], 0
        for entry in kept:
            if entry.number not in numbers:
                self._keep(entry)

    def take(self) -> None:
        """Forget all kept entries: they are a batch now."""
        self._kept, self._charge = [], 0

    def _has_unseen(self, through: int | None) -> bool:
        return bool(self._unseen) and (through is None or self._unseen[0].number <= through)

    def _put_back(self, through: int) -> None:
        """Have the kept ones behind an entry decided later."""
        behind = [entry for entry in self._kept if entry.number > through]
        self.discard({entry.number for entry in behind})
        self._unseen.extendleft(reversed(behind))

    def _is_enough(self, makes_batch: Callable[[int, int], bool]) -> bool:
        return bool(self._kept) and makes_batch(len(self._kept), self._charge)

    def _judge_again(self) -> None:
        now = self._circumstances()
        if now != self._judged_under:
            self._judged_under = now
            self.discard({entry.number for entry in self._kept if not self._judge(entry)})

    def _keep(self, entry: LogEntry) -> None:
        assert entry.header is not None, "entries without a header never become pending"
        self._kept.append(entry)
        self._charge += entry.header.charge
