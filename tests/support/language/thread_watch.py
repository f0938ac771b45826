"""How many threads torch has while a model is trained, and two of them for a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ThreadWatch(threading.Event):
    """Notes how many threads torch has whenever a training asks whether it is to end."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set[int]()

    def is_set(self) -> bool:
        """As ever."""
        self.threads.add(torch.get_num_threads())
        return super().is_set()


@contextmanager
def two_threads() -> Iterator[None]:
    """Torch has two threads, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
