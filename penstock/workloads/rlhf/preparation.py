"""The preparation of a run of language models: it makes missing models, feedback and prompts.

Each part is written under another name and then moved, or has a file that is written last. So incomplete
parts of an interrupted preparation are made again, and complete ones are kept.
"""

import gc
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from penstock.config.settings import ConfigurationError, Progress, Rehearsal, Scores, Settings
from penstock.config.workload import Services
from penstock.workloads.language.feedback import Scored, Source, read, rows_of, scale_of, write_rows
from penstock.workloads.language.guard import read_guard_files
from penstock.workloads.language.pretraining.conversation_files import (
    packaged_conversations,
    read_conversations,
)
from penstock.workloads.language.settings import quieten, training_settings, whole_folder
from penstock.workloads.rlhf.environment import Language, language

log = logging.getLogger(__name__)

S = TypeVar("S")

BASE_MODEL: Final = "base_model"
FEEDBACK: Final = "feedback.jsonl"
REWARD_MODEL: Final = "reward_model"
MANIFEST: Final = "manifest.json"
RESULTS: Final = "training_results.json"
BESIDE: Final = f"./{BASE_MODEL}"
"""The base model of the models that are exported with it, from the folder that holds all of them."""
_PLACES: Final = (
    *("model", "prompts", "feedback", "reward", "conversations"),
    *("guard_rules", "guard_classifier"),
)
_TEXTS: Final = 4000
_STEPS: Final = 400
_OPINIONS: Final = 2500
_VOCABULARY: Final = 4000
"""Most words of a model of the feedback's words."""
_SPREAD: Final = 0.125
"""Standard deviation of the tiny model's initial weights, which lets an adapter prefer a word strongly."""


def prepare(settings: Settings, run_dir: Path, progress: Progress) -> Settings:
    """Return the settings with the places of all made parts; raises ConfigurationError, Interrupted."""
    made, section = made_first(settings, run_dir, progress)
    if not section.reward:
        made["reward"] = _reward_model(section, run_dir, settings.seed, progress)
    return with_places(settings, made)


def made_first(settings: Settings, run_dir: Path, progress: Progress) -> tuple[dict[str, Any], Language]:
    """Make all but the reward model; returns the made places, and the section with them."""
    quieten()
    section = language(settings.environment)
    # A server reads them; errors in them are reported before anything is made.
    read_guard_files(section)
    made: dict[str, Any] = {}
    if section.task == "sentiment":
        made |= _sentiment(section, run_dir, settings.seed, progress)
    if section.task == "chat":
        made |= _chat(section, run_dir, settings.seed, progress)
    if section.task == "words" and not section.model:
        made["model"] = str(_model_of_words(section, run_dir / BASE_MODEL, settings.seed, progress))
    section = section.model_copy(update=made)
    made["prompts"] = section.prompts or section.feedback
    section = section.model_copy(update=made)
    _check(section)
    return made, section


def services(settings: Settings, sockets: Path) -> Services:
    section = language(settings.environment)
    if not section.serve_reward:
        return Services()
    address = f"unix:{sockets / 'reward.sock'}"
    options = ("--listen", address, "--device", section.reward_device)
    command = ("rlhf", "reward", "serve", section.reward, *options)
    return Services(commands={"reward": command}, places={"reward": address})


def _check(section: Language) -> None:
    if not section.model:
        raise ConfigurationError("environment.kwargs.model='': name the folder of the model that is trained")
    if not section.prompts:
        raise ConfigurationError("environment.kwargs.prompts='': name prompts, or feedback that has them")
    if not section.reward and not section.feedback:
        raise ConfigurationError(
            "environment.kwargs.reward='': name a source of rewards, or feedback that a reward model is "
            "trained on"
        )
    if section.serve_reward and section.reward and not Path(section.reward).is_dir():
        raise ConfigurationError(
            f"environment.kwargs.reward={section.reward!r}: serve_reward serves a reward model's folder; say "
            "serve_reward=false, or name one"
        )


def _sentiment(section: Language, run_dir: Path, seed: int, progress: Progress) -> dict[str, str]:
    from penstock.workloads.rlhf.sentiment import WORDS, Sentiment  # noqa: PLC0415 - only for this task

    file, folder, task = run_dir / FEEDBACK, run_dir / BASE_MODEL, Sentiment()
    if not section.feedback and not file.exists():
        progress.say(f"preparing: {_OPINIONS:,} noisy opinions in {file}")
        write_rows(file, task.scored(np.random.default_rng(seed), _OPINIONS))
    if not section.model and not folder.is_dir():
        # It generates like the reference policy of the task.
        progress.say(f"preparing: a tiny language model, pre-trained for {_STEPS} steps, in {folder}")
        rng = np.random.default_rng(seed)
        texts = [(task.prompt(rng), task.response(rng)) for _ in range(_TEXTS)]
        _pretrain(WORDS, texts, folder, seed, progress)
    return {
        "model": section.model or str(folder.absolute()),
        "feedback": section.feedback or str(file.absolute()),
        "feedback_scale": section.feedback_scale if section.feedback else "percent",
        "true_reward": section.true_reward or "penstock.workloads.rlhf.sentiment:true_rewards",
    }


def _model_of_words(section: Language, folder: Path, seed: int, progress: Progress) -> Path:
    """Make a tiny language model of the feedback's words that generates like its responses."""
    from penstock.workloads.language.pretraining.tiny_models import MAX_TOKENS  # noqa: PLC0415 - loads torch

    if not section.feedback:
        raise ConfigurationError("environment.kwargs.feedback='': task='words' makes its model from feedback")
    if not folder.is_dir():
        progress.say(f"preparing: a tiny language model of the feedback's words, in {folder}")
        texts = [text for _, row in rows_of(section.feedback) for text in _texts(row)]
        counts = Counter(word for both in texts for text in both for word in text.split())
        # Independent of the order of the rows.
        words = [word for word, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
        if not _pretrain(words[:_VOCABULARY], texts, folder, seed, progress):
            raise ConfigurationError(
                f"environment.kwargs.feedback={section.feedback}: no text has {MAX_TOKENS} words or fewer; "
                "name a model for longer ones"
            )
    return folder.absolute()


def _pretrain(
    words: Sequence[str], texts: Sequence[tuple[str, str]], folder: Path, seed: int, progress: Progress
) -> bool:
    """Make a tiny model of these words, trained on texts; False where it can read none of them."""
    from penstock.workloads.language.pretraining import tiny_models  # noqa: PLC0415 - loads torch

    tokenizer = tiny_models.build_tokenizer(words)
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE  # without one no server of text answers with it
    fitting = tiny_models.fitting(tokenizer, texts)
    if not fitting:
        return False
    model = tiny_models.build_model(tokenizer, seed=seed, spread=_SPREAD)
    loss = tiny_models.pretrain(model, tokenizer, fitting, steps=_STEPS, seed=seed, stop=progress.stop)
    log.info("pre-trained", extra={"nats_per_token": loss})
    with whole_folder(folder) as temporary:
        tiny_models.save(model, tokenizer, temporary)
    return True


def _texts(row: Any) -> list[tuple[str, str]]:
    """Return a row's prompt with each of its responses; empty for a bad row, which the training reports."""
    if isinstance(row, ValueError) or row.get("prompt") is None:
        return []
    prompt, responses = row["prompt"], [row.get(name) for name in ("response", "chosen", "rejected")]
    if isinstance(prompt, list):
        prompt = " ".join(str(one.get("content", "")) for one in prompt if isinstance(one, dict))
    return [(str(prompt), str(response)) for response in responses if response is not None]


def _reward_model(section: Language, run_dir: Path, seed: int, progress: Progress) -> str:
    """Train a reward model on the feedback, or resume its training; returns its folder."""
    from penstock.workloads.language.reward.heads import doubt  # noqa: PLC0415
    from penstock.workloads.language.reward.reward_model import CARD  # noqa: PLC0415 - loads torch
    from penstock.workloads.language.reward.training import train  # noqa: PLC0415

    folder = (run_dir / REWARD_MODEL).absolute()
    if (folder / CARD).exists():
        return str(folder)
    order = order_of(section, folder, seed)
    progress.say(f"preparing: a reward model from {section.feedback}, in {folder}")
    results = train(order, progress.stop)
    release_device()
    found = results["validation"] or {}
    measured = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if value is not None)
    feedback = results["feedback"]
    if feedback["bad_rows"]:
        named = f"{feedback['bad_rows']} bad rows of {feedback['place']}:"
        progress.say("\n".join([named, *feedback["bad_rows_shown"]]))
    trained = f"the reward model is trained: {results['steps']} steps in {results['seconds']:g} s; {measured}"
    progress.say("\n".join(filter(None, [trained, doubt(results["validation"])])))
    return str(folder)


def release_device() -> None:
    """Free cached GPU memory for the processes of the run."""
    import torch  # noqa: PLC0415 - is loaded already

    gc.collect()
    torch.cuda.empty_cache()


def order_of(section: Language, folder: Path, seed: int) -> Any:
    from penstock.workloads.language.reward.training import CHECKPOINTS, Order  # noqa: PLC0415 - loads torch

    scale = scale_of(section.feedback_scale, "environment.kwargs.feedback_")
    return Order(
        source=Source(place=section.feedback, scale=scale),
        base=section.model,
        out=folder,
        settings=_settings_of("reward_training", training_settings, section.reward_training, seed),
        resume=any((folder / CHECKPOINTS).glob("checkpoint-*")),
    )


def _settings_of(key: str, read: Callable[[tuple[str, ...]], S], values: Mapping[str, Any], seed: int) -> S:
    given = tuple(f"{name}={json.dumps(value)}" for name, value in values.items())
    try:
        return read((f"seed={seed}", *given))
    except ConfigurationError as error:
        raise ConfigurationError(f"environment.kwargs.{key}.{error}") from error


def with_places(settings: Settings, made: dict[str, Any]) -> Settings:
    kwargs = {**settings.environment.kwargs, **made}
    kwargs |= {key: absolute(kwargs[key]) for key in _PLACES if key in kwargs}
    policy = {"model": kwargs["model"], **settings.policy.kwargs}
    if absolute(policy["model"]) != kwargs["model"]:
        raise ConfigurationError(
            f"policy.kwargs.model={policy['model']!r}: environment.kwargs.model names another base model, "
            f"{kwargs['model']!r}; leave one of the two out: a run trains one"
        )
    return settings.model_copy(
        update={
            "environment": settings.environment.model_copy(update={"kwargs": kwargs}),
            "policy": settings.policy.model_copy(update={"kwargs": policy}),
        }
    )


def absolute(place: str) -> str:
    """Return the absolute path of an existing folder or file; other places stay as they are."""
    return str(Path(place).absolute()) if place and Path(place).exists() else place


# ---- A short preparation, for a dry run.

STEPS: Final = 12
LEAST_STEPS: Final = 4
WITHIN_S: Final = 20.0
"""Seconds after which no further step begins once there are LEAST_STEPS."""
WARMUP_STEPS: Final = 2
"""First steps, which are slower and not counted."""


def rehearse(settings: Settings, folder: Path, progress: Progress) -> Rehearsal:
    """Rehearse as `Workload.rehearse` says; raises ConfigurationError, Interrupted."""
    made, section = made_first(settings, folder, progress)
    if section.reward:
        return Rehearsal(settings=with_places(settings, made))
    from penstock.workloads.language.reward.training import StepWatch, train  # noqa: PLC0415 - loads torch

    order = order_of(section, (folder / REWARD_MODEL).absolute(), settings.seed)
    progress.say(f"rehearsing: up to {STEPS} steps of the reward model's training on {section.feedback}")
    watch = StepWatch(STEPS, least=LEAST_STEPS, within_s=WITHIN_S)
    train(order, progress.stop, [watch])
    release_device()
    more_s = missing_seconds([later - earlier for earlier, later in pairwise(watch.at_s)], watch.steps)
    made["reward"] = str(order.out)
    scores = [example.score for example in read(order.source).examples if isinstance(example, Scored)]
    return Rehearsal(
        settings=with_places(settings, made), more_seconds=more_s, scores={"feedback": Scores.of(scores)}
    )


def missing_seconds(made: list[float], steps: int) -> float:
    """Return the estimated seconds of the remaining steps. made: seconds of each finished step."""
    later = made[WARMUP_STEPS:] or made
    return max(0, steps - len(made)) * math.fsum(later) / max(len(later), 1)


# ---- The task `chat`: a small model trained on conversations, and their questions as prompts.

PROMPTS: Final = "prompts.jsonl"


def _chat(section: Language, run_dir: Path, seed: int, progress: Progress) -> dict[str, str]:
    """Return the places of model and prompts, which are made unless named or present."""
    files = [Path(section.conversations)] if section.conversations else []
    folder, file = run_dir / BASE_MODEL, run_dir / PROMPTS
    if not section.model and not folder.is_dir():
        _teach(section, files, folder, seed, progress)
    if not section.prompts and not file.exists():
        conversations = read_conversations(files)[0] if files else packaged_conversations()
        first = [one.messages[0] for one in conversations]
        begun = dict.fromkeys(one.content for one in first if one.role == "user")
        write_rows(file, ({"prompt": [{"role": "user", "content": text}]} for text in begun))
    return {
        "model": section.model or str(folder.absolute()),
        "prompts": section.prompts or str(file.absolute()),
    }


def _teach(section: Language, files: list[Path], folder: Path, seed: int, progress: Progress) -> None:
    from penstock.workloads.language.pretraining.tiny_models import (  # noqa: PLC0415 - loads torch
        pretrain_base,
        pretraining_settings,
    )

    settings = _settings_of("base_training", pretraining_settings, section.base_training, seed)
    name = section.conversations or "the conversations of a package"
    progress.say(f"preparing: a small model learns {name}, in {folder}")
    with whole_folder(folder) as temporary:
        result = pretrain_base(files, temporary, settings, stop=progress.stop)
    measured, before, after = "", result["loss_before"], result["loss"]
    if after is not None:
        measured = f"; of {result['held_out']} held out: loss {before:.3g} before, {after:.3g} after"
    progress.say(f"the model has learned {result['conversations']} conversations{measured}")


def name_base(model: Path, old: str | Path, new: str) -> None:
    """Replace the name of the base model in a model's files. old: its name there, or its folder."""
    for file in model.glob("*.json"):
        text = file.read_text()
        for name in {str(old), str(Path(old).resolve())}:
            text = text.replace(json.dumps(name), json.dumps(new))
        file.write_text(text)
