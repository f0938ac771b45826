"""What a process computes on: its device, and how many threads."""

import torch

from penstock.config.settings import ConfigurationError, Settings


def device_of(settings: Settings, index: int = 0) -> torch.device:
    """Return where a process learns. index: which of this machine's ranks it is; each has a GPU of its own.

    Raises ConfigurationError when there is no such GPU.
    """
    name = settings.learner.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("learner.device='cuda': torch sees no CUDA device; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"learner.device={settings.learner.device!r}: rank {index} of this machine has no GPU of its "
            f"own, torch sees {torch.cuda.device_count()}; start as many ranks as there are, or say "
            "device=cpu"
        )
    return torch.device(name, index)


def use_threads(settings: Settings) -> None:
    """Bound torch's own threads before anything is computed; call once, early."""
    torch.set_num_threads(settings.learner.threads)
