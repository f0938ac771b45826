"""Reads what Weights & Biases wrote offline.

Records in the framing of LevelDB's log, each a protobuf message.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_FILE_HEADER, _HEADER = 7, struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # generated

    rows = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    at, part = _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _HEADER.size:
            at += room
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        part += data[at + _HEADER.size : at + _HEADER.size + size]
        at += _HEADER.size + size
        if kind in (_FULL, _LAST):
            yield part
            part = b""
