"""The watchdog of a rank: its thread."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from nemo_oprd.runtime import watchdog


class SlowStore:
    """A store whose answer to `check` takes a moment, as over a busy network."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        time.sleep(0.3)
        return self.store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_close_waits_until_the_thread_has_left_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in a call of the store while the interpreter shuts down would abort the process."""
    timeout = datetime.timedelta(seconds=20)
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    slow = SlowStore(master)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(master.port))
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: slow)
    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.01)
    master.set("nemo_oprd/0/process/1", "another machine 1")
    watch = watchdog.Watchdog(0, 2, silent_s=20.0)
    assert slow.asked.wait(20)
    watch.close()
    assert not watch._thread.is_alive()
