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

from penstock.client.asynchronous import ActStream as ActStream
from penstock.client.asynchronous import AsyncControlClient as AsyncControlClient
from penstock.client.asynchronous import AsyncConversation as AsyncConversation
from penstock.client.asynchronous import AsyncEpisode as AsyncEpisode
from penstock.client.asynchronous import AsyncPolicyClient as AsyncPolicyClient
from penstock.client.asynchronous import AsyncTextClient as AsyncTextClient
from penstock.client.errors import BadReply as BadReply
from penstock.client.errors import DeadlinePassed as DeadlinePassed
from penstock.client.errors import EpisodeElsewhere as EpisodeElsewhere
from penstock.client.errors import EpisodeUnknown as EpisodeUnknown
from penstock.client.errors import InvalidRequest as InvalidRequest
from penstock.client.errors import NotAllowed as NotAllowed
from penstock.client.errors import NotReady as NotReady
from penstock.client.errors import Overloaded as Overloaded
from penstock.client.errors import PolicyError as PolicyError
from penstock.client.errors import UnknownVersion as UnknownVersion
from penstock.client.errors import Unreachable as Unreachable
from penstock.client.synchronous import Conversation as Conversation
from penstock.client.synchronous import Episode as Episode
from penstock.client.synchronous import ExternalEnvironment as ExternalEnvironment
from penstock.client.synchronous import PolicyClient as PolicyClient
from penstock.client.synchronous import TextClient as TextClient
from penstock.client.text_calls import Generation as Generation
from penstock.client.text_calls import TextAnswer as TextAnswer
from penstock.client.text_calls import TextDescription as TextDescription
from penstock.client.text_calls import TextPart as TextPart
from penstock.client.text_calls import Thought as Thought
from penstock.client.values import Action as Action
from penstock.client.values import ActionBatch as ActionBatch
from penstock.client.values import ActOptions as ActOptions
from penstock.client.values import Arm as Arm
from penstock.client.values import CommandRefusal as CommandRefusal
from penstock.client.values import CommandReport as CommandReport
from penstock.client.values import CommandState as CommandState
from penstock.client.values import Description as Description
from penstock.client.values import EpisodeResult as EpisodeResult
from penstock.client.values import Fallback as Fallback
from penstock.client.values import RunStatus as RunStatus
from penstock.client.values import ServedVersion as ServedVersion
from penstock.client.values import StepOptions as StepOptions
from penstock.rpc.auth import Credentials as Credentials
