"""Commands of operators as a few lines of Python: noted once by their id, answered once, decided once."""

from dataclasses import dataclass, field

from penstock.broker.log.script import KEPT_COMMANDS, MAX_PENDING_COMMANDS
from penstock.protocol.messages import RunState
from penstock.protocol.refusal import Reason


@dataclass
class Noted:
    """A command. through: newest entry of a flush, once decided. answer: JSON, once given."""

    request_id: str
    action: str
    argument: str
    through: int | None = None
    answer: str = ""


@dataclass
class Commands:
    """What Redis holds of them, and the state that is wanted of the run."""

    newest: int = 0
    noted: dict[int, Noted] = field(default_factory=dict)
    desired: RunState = RunState.RUNNING

    def ask(self, request_id: str, action: str, argument: str) -> tuple[int, Reason | None]:
        """The number of the command, and why it is not taken."""
        for number, known in self.noted.items():
            if known.request_id == request_id:
                is_same = (known.action, known.argument) == (action, argument)
                return number, None if is_same else Reason.INVALID
        if len(self.pending()) >= MAX_PENDING_COMMANDS:
            return 0, Reason.FULL
        self.newest += 1
        self.noted[self.newest] = Noted(request_id, action, argument)
        self.noted.pop(self.newest - KEPT_COMMANDS, None)
        return self.newest, None

    def pending(self) -> list[int]:
        """Numbers of those without an answer."""
        return [number for number, one in self.noted.items() if not one.answer]

    def answer(self, number: int, text: str) -> None:
        """A command that was lost stays lost."""
        if number in self.noted:
            self.noted[number].answer = text

    def decide(self, number: int, newest_entry: int) -> None:
        """What a flush takes, once."""
        known = self.noted.get(number)
        if known is not None and known.through is None:
            known.through = newest_entry

    def control(self, action: str) -> RunState:
        """Pause or resume."""
        self.desired = RunState.PAUSED if action == "pause" else RunState.RUNNING
        return self.desired
