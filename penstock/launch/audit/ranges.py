"""Sets of numbers as inclusive ranges: a session's sequence numbers are dense, so few ranges hold many."""

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]
Ranges = list[Range]
"""Rising, disjoint and not touching, as `merge` makes them."""


def merge(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers in any of `ranges`."""
    merged: Ranges = []
    for first, last in sorted((first, last) for first, last in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def of_numbers(numbers: Iterable[int]) -> Ranges:
    """Return the numbers as ranges."""
    return merge((number, number) for number in numbers)


def overlaps(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Return the numbers that are in more than one of `ranges`."""
    found: Ranges = []
    reached = 0
    for first, last in sorted((first, last) for first, last in ranges):
        if found_last := min(last, reached) if first <= reached else 0:
            found.append((first, found_last))
        reached = max(reached, last)
    return merge(found)


def subtract(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the numbers in `ranges` that are not in `other`."""
    left: Ranges = []
    at = 0
    for first, last in ranges:
        begin = first
        while at < len(other) and other[at][1] < begin:
            at += 1
        index = at
        while index < len(other) and other[index][0] <= last:
            if other[index][0] > begin:
                left.append((begin, other[index][0] - 1))
            begin = other[index][1] + 1
            index += 1
        if begin <= last:
            left.append((begin, last))
    return left


def intersect(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the numbers in both."""
    return subtract(ranges, subtract(ranges, other))


def count(ranges: Iterable[Sequence[int]]) -> int:
    """Return how many numbers there are."""
    return sum(last - first + 1 for first, last in ranges)


def numbers(ranges: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield every number, in order."""
    for first, last in ranges:
        yield from range(first, last + 1)
