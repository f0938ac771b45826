"""When weights may be published again."""

from penstock.config.settings import LearnerSection
from penstock.learner.publish.publisher import PublishInterval
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES

LARGE = WEIGHT_CHUNK_BYTES + 1


class Run:
    """Time and what is being fetched, as a test sets them."""

    def __init__(self, **section: float) -> None:
        self.now_s, self.fetched = 0.0, 1
        self.interval = PublishInterval(
            LearnerSection.model_validate(section), lambda: self.fetched, lambda: self.now_s
        )

    def is_over(self, passed_s: float) -> bool:
        """Whether it is that long after a publication."""
        self.now_s = passed_s
        return self.interval.is_over()


def test_the_first_publication_is_due_at_once_and_small_weights_are_always() -> None:
    run = Run()
    assert run.is_over(0.0)
    run.interval.published(WEIGHT_CHUNK_BYTES)
    assert run.is_over(0.0)


def test_large_weights_wait_for_fetches_up_to_a_bound() -> None:
    run = Run(publish_fetch_wait_s=2.0)
    run.interval.published(LARGE)
    assert not run.is_over(1.9)
    assert run.is_over(2.0)
    run.fetched = 0
    assert run.is_over(0.0)


def test_the_least_interval_holds_whatever_is_fetched() -> None:
    run = Run(publish_interval_ms=3000.0, publish_fetch_wait_s=2.0)
    run.fetched = 0
    run.interval.published(LARGE)
    assert not run.is_over(2.5)
    assert run.is_over(3.0)
