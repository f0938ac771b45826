"""A model that has learned by heart to think before it answers, and how it thinks.

asked    sum
thought  lookup 3 (and the end)    answer  add
none                               answer  other
"""

from pathlib import Path
from typing import Any, Final

from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.serving.text_answerer import ThinkingForm
from tests.support.language.text_stand import TOKENIZER, teach

OPENS, END, CLOSES, DIRECTLY = "sea", "done", "lookup", "3"
THOUGHT: Final = "lookup 3"
BEHIND, WITHOUT = "add", "other"
"""What is answered with a thought, and without one."""
MOST: Final = 5


def ids(text: str) -> tuple[int, ...]:
    """Its tokens."""
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def form_of(**fields: Any) -> ThinkingForm:
    """How it thinks."""
    usual: dict[str, Any] = {
        "opens": ids(OPENS),
        "end": ids(END)[0],
        "closes": ids(CLOSES),
        "directly": ids(DIRECTLY),
        "most": MOST,
    }
    return ThinkingForm(**(usual | fields))


def make_thinker(folder: Path) -> Path:
    """The model, in a folder."""
    model = tiny_models.build_model(TOKENIZER, seed=0)
    asked = "<user> sum <eos> <assistant>"
    rows = (
        f"{asked} {OPENS} {THOUGHT} {END} {CLOSES} {BEHIND} <eos>",
        f"{asked} {DIRECTLY} {WITHOUT} <eos>",
    )
    teach(model, [ids(row) for row in rows], 150)
    tiny_models.save(model, TOKENIZER, folder)
    return folder
