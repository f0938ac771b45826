"""What `penstock serve` answers clients of a run with: text, by the model that the run trains."""

from penstock.config.settings import Settings
from penstock.protocol.specification import RunSpecification
from penstock.workloads.language.serving.text_answerer import open_guard
from penstock.workloads.language.serving.text_server import TextServer
from penstock.workloads.language.tokenizer import load_tokenizer
from penstock.workloads.plugin import acting
from penstock.workloads.plugin.serving import RunFollower, Source
from penstock.workloads.rlhf.environment import language


def make_server(
    settings: Settings, source: Source, specification: RunSpecification, run_follower: RunFollower | None
) -> TextServer:
    """Return the server; settings: of this process. Raises ConfigurationError, and as `acting.read`."""
    of = acting.read(specification, settings.actor)
    section = language(of.environment)
    return TextServer(
        settings,
        source,
        of,
        run_follower,
        tokenizer=load_tokenizer(section.model),
        answer_tokens=section.response_tokens,
        device=section.device,
        engine_name=section.engine,
        guard=open_guard(
            is_on=section.guard,
            rules=section.guard_rules,
            classifier=section.guard_classifier,
            penalty=section.guard_penalty,
        ),
    )
