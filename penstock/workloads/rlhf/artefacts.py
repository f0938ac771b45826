"""Files of an ended run of language models: its last policy in Hugging Face's format, and a manifest.

    RUN/policies/vN/             adapter or model, tokenizer, and how it was sampled in training; the adapter
                                 names RUN/base_model, where the run made one, from RUN
    RUN/value_head.safetensors   the critic of the last checkpoint
    RUN/manifest.json            the sha256 of all files, their sources, a summary of the results
    RUN/training_results.json    summary and full history

Nothing of it is pickled: transformers and peft alone read the policy.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.settings import ActorSection, Settings
from penstock.protocol.specification import RunSpecification
from penstock.runtime.output_file import replace_file
from penstock.workloads.language.cached_generation import make_backend
from penstock.workloads.language.tokenizer import Encoder, end_ids, load_tokenizer, without_end
from penstock.workloads.plugin import acting
from penstock.workloads.rlhf.environment import language
from penstock.workloads.rlhf.preparation import (
    BASE_MODEL,
    BESIDE,
    FEEDBACK,
    MANIFEST,
    RESULTS,
    REWARD_MODEL,
    name_base,
)

VALUE_HEAD: Final = "value_head.safetensors"
_HISTORY: Final = "metrics.jsonl"
_SHORT: Final = ("solved", "mean_return", "evaluation", "env_steps", "updates", "policy_version")


def write(settings: Settings, run_dir: Path, summary: dict[str, Any]) -> None:
    """Write all files; without a final policy, as after a failure, only the results."""
    _write_json(run_dir / RESULTS, {**summary, "history": _history(run_dir)})
    folder, section = _policy(settings, run_dir), language(settings.environment)
    places = (folder, _value_head(run_dir), run_dir / REWARD_MODEL, run_dir / FEEDBACK, run_dir / RESULTS)
    files = [file for place in places if place is not None for file in _files(place)]
    manifest = {
        "run": settings.run,
        "workload": settings.workload,
        "algorithm": settings.algorithm.name,
        "policy": None if folder is None else str(folder.relative_to(run_dir)),
        "made_from": {"model": section.model, "prompts": section.prompts, "reward": section.reward},
        "reward_model": _card(Path(section.reward)),
        "results": {name: summary.get(name) for name in _SHORT},
        "files": {str(file.relative_to(run_dir)): _sha256(file) for file in files},
    }
    _write_json(run_dir / MANIFEST, manifest)


def _policy(settings: Settings, run_dir: Path) -> Path | None:
    """Return the folder of the final policy, written where it is absent; None: the run has none."""
    from penstock.policy.weights import load_into  # noqa: PLC0415 - loads torch, as what follows
    from penstock.workloads.language.policy import build  # noqa: PLC0415
    from penstock.workloads.language.settings import quieten  # noqa: PLC0415
    from penstock.workloads.plugin.serving import read_final  # noqa: PLC0415

    try:
        final = read_final(run_dir)
    except ValueError:
        return None
    folder = run_dir / "policies" / f"v{final.version}"
    if (folder / "generation_config.json").exists():
        return folder
    quieten()
    specification = final.specification
    policy = build(
        specification.observation_space, specification.action_space, settings.policy, specification.seed
    )
    load_into(policy, final.blob)
    tokenizer = load_tokenizer(language(settings.environment).model)
    policy.network.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    _generation(settings, tokenizer).save_pretrained(folder)
    name_base(folder, run_dir / BASE_MODEL, BESIDE)
    return folder


def _value_head(run_dir: Path) -> Path | None:
    """Write the critic, which published versions lack; None where there is no whole checkpoint."""
    from safetensors.torch import save_file  # noqa: PLC0415 - loads torch

    from penstock.workloads.plugin.serving import checkpoint_tensors  # noqa: PLC0415

    critic = checkpoint_tensors(run_dir, "critic")
    if critic is None:
        return None
    save_file(critic, run_dir / VALUE_HEAD)
    return run_dir / VALUE_HEAD


def _generation(settings: Settings, tokenizer: Any) -> Any:
    """Return the sampling of responses in training, for `generate` of transformers."""
    from transformers import GenerationConfig  # noqa: PLC0415 - loads torch

    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=language(settings.environment).response_tokens,
        eos_token_id=end_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def _history(run_dir: Path) -> list[Any]:
    file = run_dir / _HISTORY
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def _card(folder: Path) -> Any:
    file = folder / RESULTS
    if not file.exists():
        return None
    results = json.loads(file.read_text())
    return {
        name: results.get(name) for name in ("sha256", "feedback", "validation", "reward_mean", "reward_std")
    }


def _files(place: Path) -> list[Path]:
    return sorted(file for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_json(file: Path, content: Any) -> None:
    replace_file(file, (json.dumps(content, indent=1, default=str) + "\n").encode())


# ---- Responses of a run's final policy to given prompts.


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    tokens: its ids, with the end token. log_prob: of all its tokens together, in nats. ended: whether it has
    one.
    """

    prompt: str
    response: str
    tokens: tuple[int, ...]
    log_prob: float
    ended: bool


def generate(
    specification: RunSpecification,
    blob: bytes,
    local: ActorSection,
    prompts: Sequence[str],
    *,
    tokens: int | None,
    seed: int,
    deterministic: bool,
) -> list[Answer]:
    """Return one response to each prompt. blob: the weights. tokens: most; None: as in training."""
    of = acting.read(specification, local)
    section = language(of.environment)
    tokenizer = load_tokenizer(section.model)
    most = tokens or section.response_tokens
    encoder = Encoder(tokenizer, of.specification.unroll_length + 1)
    rows = [encoder.prompt_ids(prompt) for prompt in prompts]
    policy = of.make_policy(specification.seed).policy
    policy.load(blob)
    backend = make_backend(policy, tokenizer, section.device)
    backend.seed(seed)
    made = backend.generate(rows, most, deterministic=deterministic)
    ids = [made.response(row) for row in range(len(rows))]
    ends = end_ids(tokenizer)
    texts = [tokenizer.decode(without_end(one, ends), skip_special_tokens=True) for one in ids]
    parts = zip(prompts, texts, ids, made.log_prob.sum(1).tolist(), made.ended.tolist(), strict=True)
    return [Answer(*part) for part in parts]
