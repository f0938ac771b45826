"""Continuous batching: each step adds a token to every running answer, of any version.

A request joins between two tokens of the others and waits for no other answer to end. One version makes the
whole answer; a newer version that is loaded meanwhile serves later requests. A version in use is not dropped.

The log-probability of a token is that of the whole distribution at temperature 1 under the version that drew
it. The learner corrects for the difference from its own, up to `algorithm.behaviour_weight_cap`.
"""

import copy
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config.settings import ConfigurationError
from penstock.policy.weights import decode
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.cached_generation import RunningBatch, draw, only_likely
from penstock.workloads.language.policy import LanguagePolicy, check_alike
from penstock.workloads.language.settings import as_configuration_error
from penstock.workloads.plugin.serving import Weights

# ---- A request for tokens, and its growing answer.


LEAST_TEMPERATURE: Final = 1e-3
"""Logits divided by less may overflow float32."""
LEAST_TOP_P: Final = 1e-6

Finish = Literal["", "eos", "length", "cancelled", "failed"]
"""Why an answer ended; empty: it grows; failed: its version failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one answer. ids: of the prompt, at least one. most: tokens of the answer.

    version: its adapter answers; 0: the base model. temperature, top_p: of the draw. seed: of the draw; None:
    the engine's generator. deterministic: take the most likely token. bias: added to the logits of token ids.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once, and once
    for each occurrence. end: the token that ends the answer; None: any of the engine's end tokens.
    """

    ids: tuple[int, ...]
    most: int
    version: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    deterministic: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    end: int | None = None

    def __post_init__(self) -> None:
        if not self.ids or self.most < 1:
            raise ValueError(f"request: {len(self.ids)} ids and most={self.most}; give at least 1 of each")
        if not LEAST_TEMPERATURE <= self.temperature <= 100.0 or not LEAST_TOP_P <= self.top_p <= 1.0:
            raise ValueError(
                f"request: temperature={self.temperature}, top_p={self.top_p}; use a temperature of "
                f"{LEAST_TEMPERATURE:g} to 100 and a top_p of {LEAST_TOP_P:g} to 1, and `deterministic` for "
                "the most likely tokens"
            )


@dataclass(slots=True)
class Growing:
    """An answer that grows. ids: its tokens so far, with the end token where the model ended it.

    log_prob: of each under the version's whole distribution at temperature 1. The engine's thread writes
    them, and calls `on_change` after each token and at the end.
    """

    request: Request
    on_change: Callable[["Growing"], None] = lambda _: None
    ids: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    finish: Finish = ""
    error: Exception | None = None
    """Why it failed."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End the answer before its next token; any thread may call it."""
        self.is_cancelled = True


# ---- Versions of one model in memory.

_OWN: Final = "default"
"""The adapter of the policy itself, which answers no request."""


class LoadedPolicies:
    """The loaded versions, and version 0, which is always there. Used by one thread at a time.

    Versions of a policy with an adapter are adapters on its base model; this object then owns its network.
    Versions of another policy are whole networks.
    """

    def __init__(self, policy: LanguagePolicy) -> None:
        """policy: version 0, which never changes."""
        self._policies = {0: policy}
        self._network: Any = policy.network
        self._own = policy.state_dict()
        self._adapter = next(iter(self._network.peft_config.values())) if policy.section.lora else None

    @property
    def versions(self) -> list[int]:
        """Those that are loaded, ascending."""
        return sorted(self._policies.keys() - {0})

    def load(self, version: int, blob: bytes) -> None:
        """Load the weights of a version, as `weights.encode` wrote them; a loaded version stays as it is.

        Raises ValueError, which names the tensor, for weights of another policy; nothing is loaded then.
        """
        if version < 1:
            raise ValueError(f"version={version}: versions are numbered from 1")
        if version in self._policies:
            return
        if self._adapter is None:
            made = copy.deepcopy(self._policies[0])
            made.load(blob)
            self._policies[version] = made
            return
        arrays = decode(blob)
        check_alike(self._own, arrays)
        name = _name(version)
        with torch.random.fork_rng(devices=()):
            self._network.add_adapter(name, self._adapter)
        with torch.no_grad():
            for path, parameter in self._network.named_parameters():
                if f".{name}." in path:
                    parameter.copy_(torch.from_numpy(arrays[path.replace(f".{name}.", ".")].copy()))
        self._network.eval()
        self._policies[version] = self._policies[0]

    def drop(self, version: int) -> None:
        """Drop a version, if it is loaded; version 0 stays."""
        if version not in self.versions:
            return
        del self._policies[version]
        if self._adapter is not None:
            self._network.set_adapter(_OWN)
            self._network.delete_adapter(_name(version))

    @contextmanager
    def using(self, version: int) -> Iterator[LanguagePolicy]:
        """Yield the policy with a version's weights; raises ValueError for a version that is not loaded."""
        self.check(version)
        policy = self._policies[version]
        if self._adapter is None:
            yield policy
        elif version == 0:
            with self._network.disable_adapter():
                yield policy
        else:
            self._network.set_adapter(_name(version))
            yield policy

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """Return the joint log-probability of each row of the probe under a version; raises as `using`."""
        with self.using(version) as policy:
            return tuple(policy.acting_log_prob(probe.observation, probe.action).tolist())

    def check(self, version: int) -> None:
        if version not in self._policies:
            raise ValueError(f"version={version}: is not loaded; loaded are {self.versions}")


def _name(version: int) -> str:
    return f"version{version}"


# ---- The engine.


class ContinuousEngine:
    """The built-in engine. Thread-safe; one thread calls `run` or `step`.

    max_rows: answers that grow at once; further requests wait.
    """

    def __init__(
        self,
        loaded: LoadedPolicies,
        *,
        end_ids: Sequence[int],
        pad_id: int,
        max_rows: int = 32,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._loaded, self._ends, self._pad, self._max_rows = loaded, end_ids, pad_id, max_rows
        self._device = device or torch.device("cpu")
        self._random = torch.Generator().manual_seed(seed)
        self._batches: dict[int, tuple[RunningBatch, list[_Row]]] = {}
        self._waiting: deque[Growing] = deque()
        self._has_work = threading.Condition()
        self._network, self._turn = threading.Lock(), threading.Lock()

    # ---- from any thread

    def submit(self, request: Request, on_change: Callable[[Growing], None] = lambda _: None) -> Growing:
        growing = Growing(request, on_change)
        with self._has_work:
            self._loaded.check(request.version)
            self._waiting.append(growing)
            self._has_work.notify_all()
        return growing

    def load(self, version: int, blob: bytes) -> None:
        """See `LoadedPolicies.load`; running answers pause for it."""
        with self._before_next_step():
            self._loaded.load(version, blob)

    def drop(self, version: int) -> bool:
        with self._before_next_step(), self._has_work:
            if version in self._batches or any(one.request.version == version for one in self._waiting):
                return False
            self._loaded.drop(version)
            return True

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        with self._before_next_step():
            return self._loaded.probe_answer(version, probe)

    @property
    def versions(self) -> list[int]:
        return self._loaded.versions

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        return sum(len(rows) for _, rows in self._batches.values())

    # ---- the thread of the engine

    def run(self, is_over: Callable[[], bool], wait_s: float = 0.1) -> None:
        """Answer until `is_over`, which is called at least every `wait_s`; then cancel all other answers."""
        while not is_over():
            if not self.step():
                with self._has_work:
                    self._has_work.wait_for(lambda: bool(self._waiting), wait_s)
        with self._has_work:
            left = [row.growing for _, rows in self._batches.values() for row in rows] + [*self._waiting]
            self._batches.clear()
            self._waiting.clear()
        for growing in left:
            growing.finish = "cancelled"
            growing.on_change(growing)

    def step(self) -> bool:
        """Add a token to each running answer and to new ones; return False where there was no request."""
        with self._turn:
            pass  # Lets waiting threads take the network first; with one lock this thread would take it back.
        with self._network, torch.inference_mode():
            joining, changed = self._joining()
            for version in sorted({*self._batches, *joining}):
                changed += self._step_or_fail(version, joining.get(version, []))
        for growing in changed:
            growing.on_change(growing)
        return bool(changed)

    @contextmanager
    def _before_next_step(self) -> Iterator[None]:
        with self._turn, self._network:
            yield

    def _joining(self) -> tuple[dict[int, list[Growing]], list[Growing]]:
        """Return the requests for which there is room, by version, and those cancelled while they waited."""
        joining: dict[int, list[Growing]] = {}
        gone: list[Growing] = []
        with self._has_work:
            room = self._max_rows - self.under_way
            while self._waiting and room > 0:
                growing = self._waiting.popleft()
                if growing.is_cancelled:
                    growing.finish = "cancelled"
                    gone.append(growing)
                    continue
                joining.setdefault(growing.request.version, []).append(growing)
                room -= 1
        return joining, gone

    def _step_or_fail(self, version: int, joining: list[Growing]) -> list[Growing]:
        """Make a step of a version; where it raises, its answers fail and those of other versions do not."""
        try:
            return self._step(version, joining)
        except Exception as error:  # noqa: BLE001 - handed to the callers
            _, rows = self._batches.pop(version, (None, []))
            failed = list({id(one): one for one in [*(row.growing for row in rows), *joining]}.values())
            for growing in failed:
                growing.error, growing.finish = error, "failed"
            return failed

    def _step(self, version: int, joining: list[Growing]) -> list[Growing]:
        batch, rows = self._batches.setdefault(version, (RunningBatch(self._pad, self._device), []))
        logits: list[Tensor] = []
        with self._loaded.using(version) as policy:
            if rows:
                newest = torch.tensor([row.growing.ids[-1] for row in rows], device=self._device)
                logits.append(batch.forward(policy.network, newest))
            if joining:
                logits.append(batch.join(policy.network, [growing.request.ids for growing in joining]))
        rows += [_Row(growing, self._random) for growing in joining]
        for row, log_probs in zip(rows, torch.cat(logits).log_softmax(-1), strict=True):
            row.take(log_probs, self._ends)
        self._leave(version, batch, rows)
        return [row.growing for row in rows]

    def _leave(self, version: int, batch: RunningBatch, rows: list["_Row"]) -> None:
        kept = [index for index, row in enumerate(rows) if not row.growing.finish]
        if len(kept) == len(rows):
            return
        if not kept:
            del self._batches[version]
            return
        batch.keep(torch.tensor(kept, device=self._device))
        self._batches[version] = (batch, [rows[index] for index in kept])


class _Row:
    def __init__(self, growing: Growing, shared: torch.Generator) -> None:
        self.growing, seed = growing, growing.request.seed
        self._random = shared if seed is None else torch.Generator().manual_seed(seed)

    def take(self, log_probs: Tensor, end_ids: Sequence[int]) -> None:
        """Draw the next token from log-probabilities [V]; a cancelled answer draws none."""
        growing, request = self.growing, self.growing.request
        if growing.is_cancelled:
            growing.finish = "cancelled"
            return
        if not bool(torch.isfinite(log_probs.max())):
            growing.error = ArithmeticError(f"version {request.version}: its probabilities are no numbers")
            growing.finish = "failed"
            return
        try:
            changes = request.bias or request.presence_penalty or request.frequency_penalty
            shares = self._other_logits(log_probs) if changes else log_probs
            token = int(shares.argmax()) if request.deterministic else self._drawn(shares)
            log_prob = float(log_probs[token])
        except Exception as error:  # noqa: BLE001 - handed to the caller; the others of the batch go on
            growing.error, growing.finish = error, "failed"
            return
        growing.ids.append(token)
        growing.log_prob.append(log_prob)
        if token in (end_ids if request.end is None else (request.end,)):
            growing.finish = "eos"
        elif len(growing.ids) == request.most:
            growing.finish = "length"

    def _other_logits(self, log_probs: Tensor) -> Tensor:
        request, shares = self.growing.request, log_probs.clone()
        for token, amount in request.bias.items():
            shares[token] += amount
        for token, times in Counter(self.growing.ids).items():
            shares[token] -= request.presence_penalty + times * request.frequency_penalty
        return shares.log_softmax(-1)

    def _drawn(self, shares: Tensor) -> int:
        request = self.growing.request
        if request.temperature != 1.0:
            shares = (shares / request.temperature).log_softmax(-1)
        if request.top_p != 1.0:
            shares = only_likely(shares, request.top_p)
        uniform = torch.rand(1, generator=self._random, dtype=torch.float64).to(shares.device)
        return int(draw(shares[None], uniform))


# ---- Engines by name: `transformers`, or an entry point of `penstock.engines`.


GROUP: Final = "penstock.engines"
OWN: Final = "transformers"


class TextEngine(Protocol):
    """An engine. Thread-safe; one thread calls `run`. Version 0 is the model that training began with."""

    def submit(self, request: Request, on_change: Callable[[Growing], None] = ...) -> Growing:
        """Begin an answer under the request's version; raises ValueError for one that is not loaded."""

    def load(self, version: int, blob: bytes) -> None:
        """Load the weights of a version; raises ValueError for those of another policy."""

    def drop(self, version: int) -> bool:
        """Drop a version; return False for one that is in use, which stays."""

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """Return the joint log-probability of each row of the probe under a loaded version."""

    @property
    def versions(self) -> list[int]:
        """Return the loaded versions, ascending."""

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for room."""

    def run(self, is_over: Callable[[], bool], wait_s: float = ...) -> None:
        """Answer until `is_over`; then cancel all other answers."""


def open_engine(
    name: str, policy: LanguagePolicy, *, end_ids: Sequence[int], pad_id: int, max_rows: int, seed: int
) -> TextEngine:
    """Return the engine of a name over a policy; it then owns the policy's network.

    end_ids: tokens of which each ends an answer. max_rows: answers that grow at once. seed: of its draws. The
    entry point of another package is called with the same arguments. Raises ConfigurationError for an engine
    that is not installed or cannot be loaded.
    """
    own: dict[str, Any] = {"end_ids": end_ids, "pad_id": pad_id, "max_rows": max_rows, "seed": seed}
    if name == OWN:
        return ContinuousEngine(LoadedPolicies(policy), **own, device=policy.device)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        raise ConfigurationError(
            f"environment.kwargs.engine={name!r}: no installed package offers it (entry points of "
            f"{GROUP!r}); use one of {', '.join(sorted({OWN, *offered}))}"
        )
    what = f"{offered[name].value} cannot be loaded"
    with as_configuration_error(f"environment.kwargs.engine={name!r}: {what}", ImportError, AttributeError):
        make: Callable[..., TextEngine] = offered[name].load()
    return make(policy, **own)


# ---- The difference between an engine's answers to the probe and those of a plain forward pass.

ROOM: Final = 2.0
"""Factor of the advised tolerance over the measured difference, for the rounding of other versions."""

log = logging.getLogger(__name__)


class EngineTolerance:
    """Measures one engine when its server starts.

    name: of the engine. make_policy: returns a new policy of the run. most: `learner.probe_tolerance`.
    """

    def __init__(self, name: str, make_policy: Callable[[], LanguagePolicy], most: float) -> None:
        self._name, self._make_policy, self._most = name, make_policy, most

    def measure(self, weights: Weights, probe: Probe, given: tuple[float, ...]) -> float:
        """Return the largest |given − r| / (1 + |r|) over the probe's rows, r being the plain pass.

        given: the engine's answers under these weights. Needs memory for one more base model. Raises
        RunFailed, with both numbers, for an engine whose samples the learner would quarantine.
        """
        policy = self._make_policy()
        policy.load(weights.blob)
        right = policy.log_prob(probe.observation, probe.action).astype(np.float64)
        off = np.abs(np.asarray(given, np.float64) - right) / (1.0 + np.abs(right))
        found = float(off.max()) if off.shape == right.shape and np.isfinite(off).all() else float("inf")
        metrics.ENGINE_PROBE_DIFFERENCE.set(found)
        fields = {"engine": self._name, "difference": found, "tolerance": self._most}
        log.info("the engine's answers to the probe were measured", extra=fields)
        if not found <= self._most:
            advice = f"Set the tolerance to {ROOM * found:.1g}, or use" if np.isfinite(found) else "Use"
            raise RunFailed(
                f"environment.kwargs.engine={self._name!r}: answers the probe {found:.2g} off what "
                f"transformers answers with the same weights, and learner.probe_tolerance={self._most:g}: "
                f"all that it samples would be quarantined. {advice} another engine"
            )
        return found
