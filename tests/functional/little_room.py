"""What the pool's workers run: a teacher behind servers, for whose answers shared memory has little room."""

from __future__ import annotations

from unittest import mock

import cases

from nemo_oprd.vllm.teacher_servers import TeacherServers

ROOM_BYTES = 1 << 13


def run_verify(overrides: list[str]) -> None:
    """`verify`; the room is for seven rows of all layers."""
    with mock.patch.object(TeacherServers, "_room", return_value=ROOM_BYTES):
        cases.run_verify(overrides)
