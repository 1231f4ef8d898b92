"""Reads what W&B wrote offline: the records of a `.wandb` file, without W&B's own program that uploads them.

The file has LevelDB's log format after a header of seven bytes: blocks of 32 KiB that hold chunks of a crc (4 bytes), a
length (2), a type (1) and data. Type 1 is a whole record; 2, 3 and 4 are the first, a middle and the last part of one.
The records are protocol buffers, for which the package has the classes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK, _CHUNK = 7, 1 << 15, 7
_WHOLE, _LAST = 1, 4


def records(file: Path) -> Iterator[bytes]:
    """The records of a file."""
    data, at, parts = file.read_bytes(), _HEADER, b""
    assert data[:4] == b":W&B", data[:4]
    while at + _CHUNK <= len(data):
        if _BLOCK - at % _BLOCK < _CHUNK:  # too little room for a chunk: the rest of a block is padding
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not kind:
            return
        parts += data[at + _CHUNK : at + _CHUNK + length]
        at += _CHUNK + length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def main() -> None:
    """Prints {"history": [...], "config": {...}, "project": ..., "id": ...} of the file named on the command line."""
    from wandb.proto import wandb_internal_pb2

    history, about = [], {}
    for data in records(Path(sys.argv[1])):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.append(items)
        elif record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            about = {"project": record.run.project, "id": record.run.run_id, "config": config}
    print(json.dumps({"history": history, **about}))


if __name__ == "__main__":
    main()
