"""A tokenizer of a few words with a chat template: `<user> … <eos> <assistant> … <eos>`."""

from typing import Final

from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.tokenizer import Tokenizer

ROLES: Final = ("<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE: Final = (
    "{% if tools %}<system> {% for tool in tools %}{{ tool.function.name }} {% endfor %}<eos> {% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {% endfor %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETTING_TEMPLATE: Final = (
    "{% for message in messages %}<{{ message.role }}> "
    "{% if loop.last or message.role != 'assistant' %}{{ message.content }} {% endif %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""One that leaves earlier answers out."""


def chat_tokenizer(*words: str, template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Of these words behind the special tokens (0 … 3) and the roles (4 … 7)."""
    tokenizer = tiny_models.build_tokenizer([*ROLES, *words])
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.chat_template = template
    return tokenizer
