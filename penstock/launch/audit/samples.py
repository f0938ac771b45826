"""What servers sampled, beside what they sent and what was trained: the tokens of agents' conversations.

    sampled (before an answer left) ─► sent (read from the payload itself) ─► trained (the learner's digests)

Each run of tokens in a fragment that was sent was sampled in its conversation, once, under the version that
the fragment names; and what was trained from a server that keeps such a record is what it sent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.actor.link.sample_journal import Run, SampledLine, read_samples, sample_files
from penstock.broker.log.audit_log import HeldLog
from penstock.launch.audit import ranges
from penstock.launch.audit.findings import Kind, Problem
from penstock.launch.audit.journals import Journals
from penstock.launch.audit.lineage import Lineage
from penstock.learner.ledger import DIGEST_BYTES


@dataclass(slots=True)
class Samples:
    """All records of servers.

    actors: who keeps one. answers, sent, trained: runs of tokens. torn: lines that a crash cut.
    """

    actors: set[str] = field(default_factory=set)
    files: int = 0
    torn: int = 0
    answers: int = 0
    sent: int = 0
    trained: int = 0
    problems: list[Problem] = field(default_factory=list)
    newest: int = 0
    """Version that sampled."""
    _drawn: Counter[tuple[str, Run]] = field(default_factory=Counter)
    _sent: dict[bytes, list[int]] = field(default_factory=dict)
    """First bytes of a payload's digest → runs in each fragment of that payload."""

    def note(self, line: SampledLine) -> None:
        """Add what was drawn, or compare a fragment with it."""
        self.actors.add(line.actor)
        if not line.sha256:
            self.answers += len(line.runs)
            self._drawn.update((line.conversation, run) for run in line.runs)
            return
        self.sent += len(line.runs)
        self._sent.setdefault(bytes.fromhex(line.sha256)[:DIGEST_BYTES], []).append(len(line.runs))
        for run in line.runs:
            self.newest = max(self.newest, run.version)
            if self._drawn[line.conversation, run] < 1:
                what = f"conversation {line.conversation}: tokens of version {run.version} were not sampled"
                self.problems.append(Problem(kind=Kind.CHANGED, what=f"{what}, or were sent twice"))
            self._drawn[line.conversation, run] -= 1

    def take(self, digest: bytes) -> bool:
        """Take a fragment that was trained; False where it was not sent, or not so often."""
        found = self._sent.get(digest)
        if not found:
            return False
        self.trained += found.pop()
        return True

    def counts(self) -> dict[str, int]:
        """Return the runs of tokens, by what became of them; none without a record."""
        counts = {"answers": self.answers, "sent": self.sent, "trained": self.trained}
        return counts if self.files else {}


def read_samples_of(folders: Sequence[Path], run: str) -> Samples:
    """Read every line of `run` in the folders; "": of any run."""
    samples = Samples()
    for path in sample_files(folders):
        samples.files += 1
        for line in read_samples(path):
            if line is None:
                samples.torn += 1
            elif run in ("", line.run):
                samples.note(line)
    return samples


def check_samples(
    samples: Samples, journals: Journals, lineage: Lineage, log: HeldLog | None
) -> Iterator[Problem]:
    """Yield a problem for each token that was trained and not sampled, or under no version that exists."""
    yield from samples.problems
    published = max([line.version for line in (*lineage.lines, *lineage.others)], default=0)
    published = max(published, 0 if log is None else log.counters["version"])
    if samples.newest > published:
        what = f"tokens are of weight version {samples.newest}, the newest published is {published}"
        yield Problem(kind=Kind.UNACCOUNTED, what=what)
    actors = {session: one.actor for session, one in journals.sessions.items()}
    actors |= {} if log is None else {entry.session: entry.actor for entry in log.entries if entry.actor}
    for line in lineage.lines:
        for session, digests in line.digests.items():
            sequences = ranges.numbers(line.sessions[session])
            yield from _check_trained(samples, int(session), sequences, bytes.fromhex(digests), actors)


def _check_trained(
    samples: Samples, session: int, sequences: Iterator[int], digests: bytes, actors: Mapping[int, str]
) -> Iterator[Problem]:
    for index, sequence in enumerate(sequences):
        digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if not samples.take(digest) and actors.get(session) in samples.actors:
            what = "trained, and not what its server has sent"
            yield Problem(kind=Kind.CHANGED, session=session, first=sequence, last=sequence, what=what)
