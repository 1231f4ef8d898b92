"""Access to a server that others can reach: only holders of a token may call it, and only the run with its lease.

`Middleware` is ASGI middleware that a server loads by `--middleware nemo_oprd_middleware.Middleware`. It checks every
call but GET /health; vLLM's own `--api-key` leaves the calls open that change weights. A call that is not a GET also
needs the lease: the first run that makes one gets it, keeps it by calling, and loses it LEASE_S seconds after its last
call, or by a call of RELEASE. A released lease stays released: a late call of that start does not take it again. A
later start of the same run takes a lease over at once, and the earlier starts have then lost it. The trainer and the
server both import this module, so it needs the standard library alone.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
import time
from collections import deque
from typing import Any

# variable in a server's environment: the file with its tokens
TOKEN_FILE = "NEMO_OPRD_TOKEN_FILE"  # the name of a variable, no secret
# headers of a call: a secret of the run with a name of its start, "SECRET.START", and a description for other runs
LEASE, RUN = "x-nemo-oprd-lease", "x-nemo-oprd-run"
LEASE_S = 120.0
# calls that the middleware answers by itself: to keep the lease, and to release it
RENEW, RELEASE = "/nemo_oprd/renew", "/nemo_oprd/release"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,}")
_MOST_BYTES = 1 << 16
# late calls of a run arrive within seconds, before this many other releases
_MOST_GIVEN_BACK = 100


def read_tokens(path: str) -> list[str]:
    """Reads the tokens in a file, one per line. A server accepts all of them, a client sends the first.

    Raises:
        ValueError: the file is missing, not of this user, open to others, a link, or holds something else. The message
            does not show the content.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            text = os.read(file, _MOST_BYTES).decode(errors="replace") if stat.S_ISREG(found.st_mode) else ""
        finally:
            os.close(file)
    except OSError as error:
        raise ValueError(_wrong(path, f"can't be read ({error.strerror})")) from None
    if found.st_uid != os.geteuid():
        raise ValueError(_wrong(path, f"belongs to user {found.st_uid}, this process to {os.geteuid()}"))
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(_wrong(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, which lets others in"))
    tokens = text.split()
    if not tokens or not all(map(_TOKEN.fullmatch, tokens)):
        raise ValueError(_wrong(path, "holds no token, or something else"))
    return tokens


def _wrong(path: str, what: str) -> str:
    return (
        f"{path} {what}; expected a file of this user with mode 0600 and lines of at least 32 letters, digits, - and "
        "_: `nemo-oprd serve --token-file FILE` makes one"
    )


class Middleware:
    """The middleware of the module's docstring; `app` is the server behind it.

    Raises:
        ValueError: the file of TOKEN_FILE holds no tokens.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._tokens = [token.encode() for token in read_tokens(os.environ[TOKEN_FILE])]
        self._lease, self._run, self._since, self._ends = b"", "", "", 0.0
        self._starts: list[bytes] = []  # starts of the run that has the lease; the last one uses it
        self._given_back = deque[bytes](maxlen=_MOST_GIVEN_BACK)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes a request to the server, or refuses it."""
        answer = None if scope["type"] == "lifespan" else self._answer(scope)
        if answer is None:
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, text = answer
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})

    def _answer(self, scope: dict[str, Any]) -> tuple[int, str] | None:
        """Returns (status, text) of the middleware's own answer, often a refusal; None if the request may pass."""
        path, reads = scope["path"], scope.get("method") in ("GET", "HEAD")
        headers = {name.lower(): value for name, value in scope["headers"]}
        if path == "/health" and reads:
            return None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not sum(hmac.compare_digest(given, token) for token in self._tokens):  # all of them, in constant time
            return 401, "the call has no token, or another one; expected a token of the server's file: name that file"
        return None if reads else self._check_call(path, headers)

    async def _pass(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes an accepted request to the server."""
        await self._app(scope, receive, send)

    def _check_call(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Checks the lease for a call with a token that may change something; returns as `_answer`."""
        whole = headers.get(LEASE.encode(), b"")
        lease, _, start = whole.partition(b".")
        now = time.monotonic()
        if now > self._ends:
            self._lease = b""
        if not self._lease:
            self._starts = []
        is_others = self._lease and not hmac.compare_digest(lease, self._lease)
        if is_others or start in self._starts[:-1]:
            return 423, (
                f"since {self._since} it is leased by {self._run}; expected a server that no other run uses: wait for "
                f"the end of that run (if it is dead, {self._ends - now:.0f} s), or start another server"
            )
        if path == RENEW and not self._lease:  # the run has released it meanwhile
            return 200, ""
        if whole in self._given_back:  # a request under way when its run ended
            return 423, "the run that makes the call has given its lease back; expected a run with a lease of its own"
        if lease and start not in self._starts:
            self._starts.append(start)
            self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            said = headers.get(RUN.encode(), b"").decode(errors="replace")[:200]
            self._run = "".join(letter for letter in said if letter.isprintable()) or "a run"
        self._lease, self._ends = lease, now + LEASE_S
        if path == RELEASE and lease:
            self._lease = b""
            self._given_back.append(whole)
        return (200, "") if path in (RENEW, RELEASE) else None
