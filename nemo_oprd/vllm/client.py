"""HTTP client of vLLM servers. All calls run in one thread with an event loop, so that a rank can take part in
collectives meanwhile; every call has a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from nemo_oprd.runtime.messages import ANY_RANK
from nemo_oprd.runtime.signals import StoppedWaiting, requested_stop
from nemo_oprd.runtime.waiting import Notice
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.worker.nemo_oprd_middleware import LEASE, LEASE_S, RELEASE, RENEW

logger = logging.getLogger(__name__)

T = TypeVar("T")
# a server that does not answer /health for this long counts as dead: its main thread never computes
HEALTH_TIMEOUT_S = 60.0
HEALTH_EVERY_S = 2.0
READY_EVERY_S = 0.25
# deadline of short calls, such as a pause or a query
CALL_TIMEOUT_S = 120.0
# deadline of the release of a lease; without a release, the lease expires after LEASE_S
RELEASE_TIMEOUT_S = 10.0


class ConnectionBroken(ServerDied):
    """Raised if the connection of a call ended without an answer; a call to a healthy server can be repeated."""


class Client:
    """HTTP connections to the servers that one rank calls, with an event loop in a thread of its own."""

    def __init__(self) -> None:
        self._http: dict[Path | None, Any] = {}  # by the Unix socket; None: over TCP
        self._renewals: dict[int, asyncio.Task[None]] = {}  # by the number of a server that this run leases
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every response under way has a connection
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()

    def _http_of(self, server: Server) -> Any:
        """Returns the HTTP client for a server."""
        if server.socket not in self._http:
            # a connection for each call: the server could close an idle one just as the client uses it again
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            transport = None
            if server.socket is not None:
                uds = str(server.socket)
                transport = httpx2.AsyncHTTPTransport(uds=uds, limits=limits, verify=False, trust_env=False)
            # ignores a proxy of the environment, which is meant for other hosts
            self._http[server.socket] = httpx2.AsyncClient(limits=limits, transport=transport, trust_env=False)
        return self._http[server.socket]

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` in the event loop's thread; returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end; returns its result."""
        return self.start(work).result()

    def call(self, function: Callable[[], Any]) -> None:
        """Calls `function` in the event loop's thread."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Closes all connections and ends the thread."""
        self.run(self._close())
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for renewal in self._renewals.values():
            renewal.cancel()
        await asyncio.gather(
            *self._renewals.values(), *(http.aclose() for http in self._http.values()), return_exceptions=True
        )

    def release(self, servers: list[Server]) -> None:
        """Gives the leases of servers back, for the next run."""

        async def give_back(server: Server) -> None:
            with suppress(ServerDied, ServerRefused):
                await self.post(server, RELEASE, timeout=RELEASE_TIMEOUT_S)

        async def all_of_them() -> None:
            await asyncio.gather(*(give_back(server) for server in servers if LEASE in server.headers))

        self.run(all_of_them())

    async def _renew(self, server: Server) -> None:
        """Renews a server's lease until the client closes: the run may make no call for longer than LEASE_S."""
        while True:
            await asyncio.sleep(LEASE_S / 6)
            with suppress(ServerDied, ServerRefused):  # the next call to the server reports that
                await self.post(server, RENEW, timeout=LEASE_S / 6)  # so that a renewal that hangs leaves time for more

    async def post(
        self,
        server: Server,
        path: str,
        body: Any = None,
        *,
        timeout: float,
        read: Callable[[bytes], Any] = json.loads,
    ) -> Any:
        """POSTs `body` as JSON; returns the answer as parsed by `read`, or None if the answer is empty.

        Raises:
            ServerDied: the server does not answer in time, breaks the connection, or is unhealthy after an error 5xx.
            ServerRefused: the server refuses the call.
        """
        if LEASE in server.headers and server.number not in self._renewals:
            self._renewals[server.number] = asyncio.create_task(self._renew(server))
        try:
            http, url, sent = self._http_of(server), server.base_url + path, {} if body is None else body
            answer = await http.post(url, json=sent, headers=server.headers, timeout=timeout)
        except httpx2.TimeoutException as error:
            raise ServerDied(f"{server.name} did not answer {path} within {timeout:.0f} s") from error
        except httpx2.TransportError as error:
            message = f"{server.name} broke the connection of {path} ({error}){server.last_words()}"
            raise ConnectionBroken(message) from error
        if answer.status_code == 200:
            return read(answer.content) if answer.content else None
        # an API server whose engine has just died answers 500 until it ends
        if answer.status_code >= 500 and not await self.stays_healthy(server):
            raise ServerDied(f"{server.name} answered {path} with {answer.status_code}{server.last_words()}")
        said = " ".join(answer.text.split())[:300]
        raise ServerRefused(
            f"{server.name} refuses {path} with status {answer.status_code}: {said}{server.last_words()}"
        )

    async def post_watched(
        self, server: Server, path: str, body: Any = None, *, timeout: float = CALL_TIMEOUT_S
    ) -> Any:
        """Calls `post` for a long call; raises ServerDied as soon as a health check finds the server dead.

        An API server whose engine dies during a call may never answer it, because it does not exit before all
        connections are closed.
        """
        call = asyncio.ensure_future(self.post(server, path, body, timeout=timeout))
        watch = asyncio.ensure_future(self.watch(server))
        try:
            await asyncio.wait((call, watch), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise ServerDied(f"{watch.result()}, during {path}")
        finally:
            call.cancel()
            watch.cancel()
            await asyncio.gather(call, watch, return_exceptions=True)

    async def watch(self, server: Server) -> str:
        """Polls the server's health; returns why the server counts as dead, once it does."""
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                await asyncio.to_thread(server.check_alive)  # it may read files of all processes
            except ServerDied as death:
                return str(death)
            if not await self.is_healthy(server):
                return f"{server.name} is not well, or did not answer /health within {HEALTH_TIMEOUT_S:.0f} s"

    async def is_healthy(self, server: Server, timeout: float = HEALTH_TIMEOUT_S) -> bool:
        """Returns whether the server passes a health check within `timeout` s; False at once without a connection."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = await self._http_of(server).get(server.base_url + "/health", timeout=left)
                return answer.status_code == 200
            except httpx2.ConnectError:
                return False
            except httpx2.TransportError:  # a busy server may drop a connection
                await asyncio.sleep(min(1.0, left))
        return False

    async def wait_until_healthy(self, server: Server, timeout: float) -> None:
        """Waits for a server that was just started; logs a warning if that takes long.

        Raises:
            ServerDied: it ended.
            ServerRefused: it was not ready after `timeout` seconds.
            StoppedWaiting: a signal asked the run to stop.
        """
        notice = Notice(timeout)
        while True:
            answer = asyncio.create_task(self.is_healthy(server, timeout=CALL_TIMEOUT_S))
            try:
                while not (await asyncio.wait([answer], timeout=READY_EVERY_S))[0]:
                    _look_after(server, notice)
            finally:
                answer.cancel()
            if answer.result():
                return
            _look_after(server, notice)
            await asyncio.sleep(READY_EVERY_S)

    async def call_workers(self, server: Server, method: str, *, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
        """Returns each worker's answer to a method of its extension (`worker/`)."""
        answer = await self.post_watched(server, "/collective_rpc", {"method": method}, timeout=timeout)
        return answer["results"]

    async def stays_healthy(self, server: Server) -> bool:
        """Returns whether the server is healthy after a second, in which it would notice the death of its engine."""
        await asyncio.sleep(1.0)
        return await self.is_healthy(server)


def _look_after(server: Server, notice: Notice) -> None:
    """Runs the checks that are due during a wait for a server; raises as `wait_until_healthy`."""
    server.check_alive()
    if signal := requested_stop():
        raise StoppedWaiting(f"stopped by {signal} while waiting for {server.name}")
    if notice.is_over:
        raise ServerRefused(
            f"{server.name} was not ready after {notice.limit_s:.0f} s, expected it to be within {server.key}."
            f"start_timeout: raise that if the server needs longer{server.last_words()}"
        )
    if notice.is_due:
        logger.warning(notice.line(server.name), extra=ANY_RANK)
