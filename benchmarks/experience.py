"""An actor of the project in the process that measures: no broker, no network."""

from actor.acting.header_fields import HeaderFields
from actor.rollout.fragment_builder import FragmentBuilder
from actor.rollout.seeds import action_seed, environment_seeds
from actor.specification import run as actor_run
from penstock.wire.fragment import Fragment
from penstock.wire.messages import Episode, Publication


class Experience:
    """An actor of the project without its network: weights in, fragments and ended episodes out."""

    def __init__(self, run: actor_run.Run, seed: int, actor_id: str = "actor-0") -> None:
        count = run.environment.count
        self.episodes: list[Episode] = []
        self._specification = run.specification
        self._stepper = run.make_environment(run.environment, count, seed)
        self._policy = run.make_policy(seed).policy
        self._policy.seed_actions(action_seed(seed, actor_id, 0))
        self._builder = FragmentBuilder(run.specification.schema, run.specification.unroll_length, count)
        first = self._stepper.reset(environment_seeds(seed, actor_id, 0, count))
        self._builder.start(first | self._policy.initial_state(count))
        self._sequence = 0

    def fragment(self, weights: bytes, update: int) -> Fragment:
        """Return the next unroll, acted with `weights`, those of update number `update`."""
        self._policy.load(weights)
        while not self._builder.is_full:
            acted = self._policy.act(self._builder.observation())
            stepped = self._stepper.step(self._policy.environment_action(acted.action))
            self._builder.record(acted.action, acted.log_prob, stepped, acted.state)
        self._sequence += 1
        publication = Publication(version=update + 1, update=update)
        run = self._specification.run
        fields = HeaderFields(run=run, session=1, sequence=self._sequence, weights=publication, round=0)
        fragment, episodes = self._builder.cut(fields)
        self.episodes += episodes
        return fragment
