"""The task `chat`: a small model that has learned conversations, and the questions of those to ask it.

    RUN/base_model/     the model, in Hugging Face's form, with a chat template
    RUN/prompts.jsonl   what people begin conversations with, each a conversation of one message

Both are made of `environment.kwargs.conversations`, by default of a package's.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from penstock.config.preparation import Progress
from penstock.config.settings import ConfigurationError
from penstock.registry.weight_files import replace_file
from penstock.workloads.language.feedback.examples import BadRows
from penstock.workloads.language.pretraining.conversation_files import Conversation, read_conversations
from penstock.workloads.language.pretraining.packaged_conversations import packaged_conversations
from penstock.workloads.rlhf.language_section import Language

PROMPTS: Final = "prompts.jsonl"


def made_for_chat(
    section: Language, run_dir: Path, base: Path, seed: int, progress: Progress
) -> dict[str, str]:
    """Return the places of model and prompts, which are made unless they are named or there.

    base: folder of the model. Raises ConfigurationError for conversations that cannot be used, Interrupted.
    """
    model = section.model or str(_base(section, base, seed, progress))
    return {"model": model, "prompts": section.prompts or str(_prompts(section, run_dir / PROMPTS))}


def _base(section: Language, folder: Path, seed: int, progress: Progress) -> Path:
    from penstock.workloads.language.pretraining.supervised_base import (  # noqa: PLC0415 - loads torch
        pretrain,
        pretraining_settings,
    )

    if not folder.is_dir():
        said = tuple(f"{key}={json.dumps(value)}" for key, value in section.base_training.items())
        try:
            settings = pretraining_settings((f"seed={seed}", *said))
        except ConfigurationError as error:
            raise ConfigurationError(f"environment.kwargs.base_training.{error}") from error
        progress.say(f"preparing: a small model learns {_name(section)}, in {folder}")
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        result = pretrain(_files(section), temporary, settings, stop=progress.stop)
        temporary.rename(folder)
        progress.say(f"the model has learned {result['conversations']} conversations{_measured(result)}")
    return folder.absolute()


def _measured(result: dict[str, Any]) -> str:
    if result["loss"] is None:
        return ""
    before, after = result["loss_before"], result["loss"]
    return f"; of {result['held_out']} held out: loss {before:.3g} before, {after:.3g} after"


def _prompts(section: Language, file: Path) -> Path:
    if not file.exists():
        conversations, _ = _conversations(section)
        begun = dict.fromkeys(
            one.messages[0].content for one in conversations if one.messages[0].role == "user"
        )
        rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in begun]
        replace_file(file, "".join(f"{row}\n" for row in rows).encode())
    return file.absolute()


def _conversations(section: Language) -> tuple[list[Conversation], BadRows]:
    files = _files(section)
    return read_conversations(files) if files else (packaged_conversations(), BadRows())


def _files(section: Language) -> list[Path]:
    return [Path(section.conversations)] if section.conversations else []


def _name(section: Language) -> str:
    return section.conversations or "the conversations of a package"
