"""A model that answers alone, one question after the other: `generate` of transformers, in a process.

python -m benchmarks.bare_chat MODEL COUNT      prints {"first_s": […], "whole_s": […]}
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from workloads.chat.people.chat_texts import draw_prompt
from workloads.language.prompt import Message
from workloads.language.quiet import quieten
from workloads.language.tokenizer import Encoder, load_tokenizer

ANSWER_TOKENS = 12


class _Clock:
    """A streamer of transformers that notes when tokens come; the prompt comes before them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        del value
        self.times_s.append(time.monotonic())

    def end(self) -> None:
        return


def main() -> None:
    """Answer, and print how long it took."""
    quieten()
    torch.set_num_threads(1)
    place, count = sys.argv[1], int(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False).eval()
    tokenizer = load_tokenizer(place)
    encoder, rng = Encoder(tokenizer, 128), np.random.default_rng(0)
    first_s, whole_s = list[float](), list[float]()
    for number in range(count + 10):
        began_s, clock = time.monotonic(), _Clock()
        ids = torch.tensor([encoder.prompt_ids((Message("user", draw_prompt(rng)),))])
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=ANSWER_TOKENS,
            streamer=clock,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokenizer.decode(rows[0, ids.shape[1] :], skip_special_tokens=True)
        if number >= 10:  # the first are slower
            first_s.append(clock.times_s[1] - began_s)
            whole_s.append(time.monotonic() - began_s)
    sys.stdout.write(json.dumps({"first_s": first_s, "whole_s": whole_s}) + "\n")


if __name__ == "__main__":
    main()
