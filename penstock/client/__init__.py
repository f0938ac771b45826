"""Actions of a policy server, for environments that live anywhere: no torch, no Gymnasium.

    client = PolicyClient("127.0.0.1:50052")
    client.act(observation).action                      without memory
    episode = client.start_episode()                    the same, and the system learns from it
    episode.act(observation, reward=0.5).action
    episode.end(terminated=True, reward=1.0)

`TextClient` and `AsyncTextClient` ask a server of text; `AsyncControlClient` steers a run.
`AsyncPolicyClient` is the same for an event loop, with `act_stream` for high rates; `ExternalEnvironment`
plays whole episodes of anything with `reset` and `step`.
"""

from penstock.client.asynchronous import (
    ActStream,
    AsyncControlClient,
    AsyncConversation,
    AsyncEpisode,
    AsyncPolicyClient,
    AsyncTextClient,
)
from penstock.client.errors import (
    BadReply,
    DeadlinePassed,
    EpisodeElsewhere,
    EpisodeUnknown,
    InvalidRequest,
    NotAllowed,
    NotReady,
    Overloaded,
    PolicyError,
    UnknownVersion,
    Unreachable,
)
from penstock.client.synchronous import Conversation, Episode, ExternalEnvironment, PolicyClient, TextClient
from penstock.client.text_calls import Generation, TextAnswer, TextDescription, TextPart, Thought
from penstock.client.values import (
    Action,
    ActionBatch,
    ActOptions,
    Arm,
    CommandRefusal,
    CommandReport,
    CommandState,
    Description,
    EpisodeResult,
    Fallback,
    RunStatus,
    ServedVersion,
    StepOptions,
)
from penstock.rpc.auth import Credentials

__all__ = [
    "ActOptions",
    "ActStream",
    "Action",
    "ActionBatch",
    "Arm",
    "AsyncControlClient",
    "AsyncConversation",
    "AsyncEpisode",
    "AsyncPolicyClient",
    "AsyncTextClient",
    "BadReply",
    "CommandRefusal",
    "CommandReport",
    "CommandState",
    "Conversation",
    "Credentials",
    "DeadlinePassed",
    "Description",
    "Episode",
    "EpisodeElsewhere",
    "EpisodeResult",
    "EpisodeUnknown",
    "ExternalEnvironment",
    "Fallback",
    "Generation",
    "InvalidRequest",
    "NotAllowed",
    "NotReady",
    "Overloaded",
    "PolicyClient",
    "PolicyError",
    "RunStatus",
    "ServedVersion",
    "StepOptions",
    "TextAnswer",
    "TextClient",
    "TextDescription",
    "TextPart",
    "Thought",
    "UnknownVersion",
    "Unreachable",
]
