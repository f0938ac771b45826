"""The answer that is a stream of server-sent events."""

from fastapi.responses import StreamingResponse


class EventStream(StreamingResponse):
    """An answer of server-sent events."""

    media_type = "text/event-stream"
