"""What generates responses, as a generator sees it: prompts in; tokens, and the log-probability of each, out.

Every backend draws from the whole distribution at temperature 1 and returns the log-probabilities of what it
really drew, under the weights that it drew with. `cached` is the reference; an inference engine stands behind
the same lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses to N prompts, padded on the right to the longest of L tokens.

    tokens: int64 [N, L], the response's own, `<eos>` last where it ended with one.
    log_prob: float32 [N, L], 0 behind the end.
    lengths: int64 [N].
    ended: bool [N], with `<eos>`.
    whole: bool [N], with `<eos>` or at the most tokens there may be; false: generation was stopped before.
    """

    tokens: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    lengths: NDArray[np.int64]
    ended: NDArray[np.bool_]
    whole: NDArray[np.bool_]

    def response(self, row: int) -> tuple[int, ...]:
        """Token ids of one response."""
        return tuple(self.tokens[row, : self.lengths[row]].tolist())


class Backend(Protocol):
    """Generates with the weights of this moment."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int,
        *,
        deterministic: bool = False,
        is_over: Callable[[], bool] = lambda: False,
        on_token: Callable[[], None] = lambda: None,
    ) -> Generated:
        """At most `most` tokens for each prompt, none of which is empty.

        deterministic: the most likely token each time, not drawn. is_over: asked for each token; when it is,
        what there is so far is returned. on_token: called for each.
        """

    def seed(self, seed: int) -> None:
        """Draw from here on as every backend of this kind does after this seed."""
