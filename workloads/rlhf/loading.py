"""Models are read one at a time."""

import threading
from typing import Final

LOADING: Final = threading.Lock()
"""transformers changes torch for the whole process while it reads a model; two threads at once leave it changed, and every
model read later without its weights."""
