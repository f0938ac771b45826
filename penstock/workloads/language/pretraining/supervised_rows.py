"""A conversation as token ids: what people said is context, what the assistant said is learned."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.workloads.language.conversation.chat_encoder import ChatEncoder
from penstock.workloads.language.feedback.examples import BadRows
from penstock.workloads.language.pretraining.conversation_files import Conversation
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """ids: of the conversation. learned: of each id, whether it is the assistant's, its end included."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


def supervised_rows(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int, bad: BadRows
) -> list[SupervisedRow]:
    """Return the conversations as rows of at most `max_tokens`, each cut behind its last answer that fits.

    One whose first answer does not fit, or whose text the tokenizer does not take, is counted in `bad`.
    """
    encoder, rows = ChatEncoder(tokenizer), []
    for one in conversations:
        try:
            rows.append(_row(one.messages, encoder, tokenizer, max_tokens))
        except ValueError as error:
            bad.add(one.where, str(error))
    return rows


def _row(
    messages: Sequence[Message], encoder: ChatEncoder, tokenizer: Tokenizer, max_tokens: int
) -> SupervisedRow:
    ids, learned = list[int](), list[bool]()
    begun, answered = 0, list[Message]()
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        new = messages[begun:place]
        end = tokenizer.eos_token_id
        context = encoder.follow(answered, end, new) if answered else encoder.begin(new)
        answer = [*tokenizer(message.content, add_special_tokens=False)["input_ids"], end]
        if len(ids) + len(context) + len(answer) > max_tokens:
            break
        ids += [*context, *answer]
        learned += [False] * len(context) + [True] * len(answer)
        answered = [*messages[:place]]
        begun = place + 1
    if not ids:
        raise ValueError(f"its first answer does not fit in {max_tokens} tokens: raise max_tokens")
    return SupervisedRow(tuple(ids), tuple(learned))
