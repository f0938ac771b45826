"""What `penstock serve` answers clients of a run with: the last message is a question of its task."""

from typing import Any, Final

from penstock.config.settings import ConfigurationError, Settings
from penstock.protocol.specification import RunSpecification
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.serving.text_answerer import ThinkingForm, open_guard
from penstock.workloads.language.serving.text_server import TextServer
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.serving import RunFollower, Source
from penstock.workloads.thoughts.environment import Layout, asked, task_of, thoughts_section
from penstock.workloads.thoughts.model import MIXING, mixing_width
from penstock.workloads.thoughts.tasks import Task

_TEMPLATE: Final = (
    "{% if tools %}{{ raise_exception('a model of thoughts calls no tools') }}{% endif %}"
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('a model of thoughts knows the roles user and assistant') }}{% endif %}{% endfor %}"
    "{{ bos_token }} {{ messages[-1].content }}"
)


def make_server(
    settings: Settings, source: Source, specification: RunSpecification, run_follower: RunFollower | None
) -> TextServer:
    """Return the server; settings: of this process. Raises ConfigurationError, and as `acting.read`."""
    of = acting.read(specification, settings.actor)
    if width := mixing_width(of.policy):
        raise ConfigurationError(
            f"policy.kwargs.{MIXING}={width}: a server answers from behind a thought alone and mixes "
            "nothing; serve a run that was trained without it"
        )
    section = thoughts_section(of.environment)
    task, layout = task_of(of.environment)
    answer_tokens = length_of_answers(section.task, task)
    return TextServer(
        settings,
        source,
        of,
        run_follower,
        tokenizer=question_tokenizer(layout),
        answer_tokens=answer_tokens,
        device="cpu",
        engine_name="transformers",
        guard=open_guard(is_on=section.guard, rules=section.guard_rules, classifier=section.guard_classifier),
        form=thinking_form(layout, section.thought_tokens, answer_tokens),
        words=task.words,
    )


def question_tokenizer(layout: Layout) -> Any:
    """Return the tokenizer of a task, whose chat template makes a question of the last message."""
    tokenizer = tiny_models.build_tokenizer(layout.words)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def thinking_form(layout: Layout, thought_tokens: int, answer_tokens: int) -> ThinkingForm:
    """Return how a model thinks. thought_tokens: most of a thought. answer_tokens: of every answer."""
    return ThinkingForm(
        opens=(layout.think,),
        end=layout.end,
        closes=(layout.equals,),
        directly=(layout.equals,),
        most=thought_tokens,
        answer_tokens=answer_tokens,
    )


def length_of_answers(name: str, task: Task) -> int:
    """Return the tokens of every answer of a task; nothing in a row says where an answer ends."""
    lengths = {len(one.answer) for one in asked(task)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"environment.kwargs.task={name!r}: its answers have {min(lengths)} to {max(lengths)} words, and "
            "served are answers of one length: fill shorter ones with a word of their own"
        )
    return lengths.pop()
