"""The engine that answers single requests, beside `generate` of transformers, in a process of its own.

    python -m benchmarks.text_engine FOLDER          prints one JSON object: what each way took

One thread. `bare`: `generate` of one prompt after the other. A number: so many streams at a time, each a
request that is followed by another. `versions`: 8 streams under four versions in turn. Rows end at their
length. Times are of the CPU, so that other programs of the machine do not count.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks.language_update import PROMPT, RESPONSE
from penstock.policy import weights
from workloads.language.engine.continuous_engine import ContinuousEngine
from workloads.language.engine.loaded_adapters import LoadedAdapters
from workloads.language.engine.requests import Growing, Request
from workloads.language.policy.language_policy import LanguagePolicy
from workloads.language.policy.policy_section import LanguageSection
from workloads.language.quiet import quieten

STREAMS: Final = (1, 8, 32)
VERSIONS: Final = 4
MANY: Final = 32
"""Adapters whose memory is measured."""
REQUESTS: Final = 64
_NEVER: Final = -1
"""An id that no model draws, so that each answer has its full length."""


@dataclass(frozen=True, slots=True)
class Way:
    """Tokens per CPU second, and CPU milliseconds from a request to its first token, the median."""

    tokens_per_s: float
    first_ms: float


def main() -> None:
    """Print the measurements."""
    quieten()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = LanguagePolicy(LanguageSection(model=sys.argv[1]), seed=0)
    blob = weights.encode(policy.published)
    prompts = torch.randint(3, policy.vocabulary, (REQUESTS, PROMPT)).tolist()
    ways = {"bare": _bare(policy.network, prompts[: REQUESTS // 4])}
    engine = ContinuousEngine(LoadedAdapters(policy), eos_id=_NEVER, pad_id=0)
    load_ms = _load(engine, blob, range(1, VERSIONS + 1))
    for streams in STREAMS:
        ways[str(streams)] = measured(engine, prompts, streams, versions=1)
    ways["versions"] = measured(engine, prompts, 8, versions=VERSIONS)
    before = _resident()
    _load(engine, blob, range(VERSIONS + 1, VERSIONS + 1 + MANY))
    found = {
        "ways": {name: asdict(way) for name, way in ways.items()},
        "load_ms": load_ms,
        "adapter_bytes": len(blob),
        "memory_per_adapter": (_resident() - before) / MANY,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def measured(engine: ContinuousEngine, prompts: list[list[int]], streams: int, *, versions: int) -> Way:
    """All requests, `streams` of them under way until they run out."""
    waiting, firsts = _requests(prompts, versions), list[float]()
    under_way: list[Growing] = []
    began_s = time.process_time()
    while True:
        under_way = [one for one in under_way if not one.finish]
        for request in islice(waiting, streams - len(under_way)):
            under_way.append(_submit(engine, request, firsts))
        if not under_way:
            break
        engine.step()
    return Way(len(prompts) * RESPONSE / (time.process_time() - began_s), median(firsts))


def _submit(engine: ContinuousEngine, request: Request, firsts: list[float]) -> Growing:
    asked_s = time.process_time()

    def note(growing: Growing) -> None:
        if len(growing.ids) == 1:
            firsts.append(1000 * (time.process_time() - asked_s))

    return engine.submit(request, note)


def _requests(prompts: list[list[int]], versions: int) -> Iterator[Request]:
    for number, prompt in enumerate(prompts):
        yield Request(ids=tuple(prompt), most=RESPONSE, version=1 + number % versions)


def _load(engine: ContinuousEngine, blob: bytes, versions: range) -> float:
    """CPU milliseconds for each."""
    began_s = time.process_time()
    for version in versions:
        engine.load(version, blob)
    return 1000 * (time.process_time() - began_s) / len(versions)


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _bare(network: Any, prompts: list[list[int]]) -> Way:
    return Way(_generate(network, prompts, RESPONSE)[0], median(_generate(network, prompts, 1)[1]))


def _generate(network: Any, prompts: list[list[int]], count: int) -> tuple[float, list[float]]:
    """Tokens per CPU second, and CPU milliseconds of each call."""
    took = []
    for prompt in prompts:
        ids, began_s = torch.tensor([prompt]), time.process_time()
        with torch.inference_mode():
            network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        took.append(time.process_time() - began_s)
    return len(prompts) * count / sum(took), [1000 * one for one in took]


if __name__ == "__main__":
    main()
