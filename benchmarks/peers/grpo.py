"""TRL's GRPO of a small GPT-2, run in an environment of its own (`make bench-peers`).

`python grpo.py FOLDER --threads N --warm W --batches B --seed S` trains FOLDER/model on FOLDER/prompts.jsonl
for B batches behind W others and prints one JSON line over those B: tokens (that were sampled and trained),
seconds, cpu_seconds. GRPO as TRL comes, but in float32 and without what saves memory for time.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from liked import liked  # type: ignore[import-not-found]
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

RESPONSES = 128
GROUP = 8
TOKENS = 32


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Counts sampled tokens, and the time of all batches but the first `warm`."""

    def __init__(self, warm: int) -> None:
        self.warm = warm
        self.tokens = 0
        self.began = (0.0, 0.0)

    def scored(
        self, prompts: Sequence[Any], completions: Sequence[str], completion_ids: Sequence[Any], **_: Any
    ) -> list[float]:
        """Return the rewards of a batch."""
        self.tokens += sum(map(len, completion_ids))
        rewards: list[float] = liked(prompts, completions)
        return rewards

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time after a batch was generated and trained."""
        if state.global_step == self.warm:
            self.tokens, self.began = 0, (time.perf_counter(), time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    torch.set_num_threads(said.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    clock = Clock(said.warm)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=RESPONSES,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            max_steps=said.warm + said.batches,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=said.seed,
            logging_steps=10**6,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        )
        prompts = load_dataset("json", data_files=str(said.folder / "prompts.jsonl"), cache_dir=folder)[
            "train"
        ]
        trainer = GRPOTrainer(
            str(said.folder / "model"),
            reward_funcs=clock.scored,
            args=config,
            train_dataset=prompts,
            callbacks=[clock],
        )
        trainer.train()
    seconds, cpu_seconds = time.perf_counter() - clock.began[0], time.process_time() - clock.began[1]
    outcome = {"tokens": clock.tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}
    sys.stdout.write("\n" + json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
