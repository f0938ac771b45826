"""Where a language model computes, by its name in a configuration."""

import torch


def device_of(name: str) -> str:
    """Return a device as torch names it. name: that of one, or "auto": a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
