"""A command of an operator as the message that its caller gets."""

from penstock.broker.log.commands import Command
from penstock.v1 import control_pb2 as pb


def command_to_proto(command: Command) -> pb.Command:
    """The message of a command."""
    answer = command.answer
    message = pb.Command(
        number=command.number,
        request_id=command.request_id,
        action=command.action,
        state=pb.COMMAND_STATE_PENDING,
    )
    if answer is not None:
        message.state = pb.COMMAND_STATE_REFUSED if answer.refusal else pb.COMMAND_STATE_DONE
        message.refusal = pb.CommandRefusal.ValueType(answer.refusal)
        message.detail, message.checkpoint_id = answer.detail, answer.checkpoint_id
        message.version, message.steps = answer.version, answer.steps
    return message
