"""The ledger as metrics."""

from penstock.broker.log.learner_records import Renewal
from penstock.learner.ledger import Drop, Ledger
from penstock.runtime import metrics


def show_ledger(ledger: Ledger, renewal: Renewal) -> None:
    """Set all gauges as of one renewal and one position, so that a fragment which is in none of them shows.

    Counts of 0 are set as well: a series that begins with its first event does not show that it rose.
    """
    # What was booked beyond that renewal's head was acknowledged since.
    head = max(renewal.head, ledger.position)
    metrics.LEDGER_ACKED.set(renewal.acked + head - renewal.head)
    metrics.LEDGER_LOST.set(renewal.log_lost)
    metrics.LEDGER_RESIDENT.set(head - ledger.position)
    metrics.LEDGER_TRAINED.set(ledger.trained)
    for reason in Drop:
        metrics.LEDGER_DROPPED.labels(reason.value).set(ledger.dropped[reason.value])
