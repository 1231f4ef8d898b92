"""What another user of the machine gets from running vLLM servers, and of the files that belong to them.

python vllm_intruder.py USER, with a JSON object on stdin, prints one. It becomes USER, which only root can.

    {"sockets": [PATH], "folders": [PATH], "files": [PATH], "processes": [PID], "ports": [PORT],
     "calls": [[METHOD, PATH]], "headers": [{NAME: VALUE}]}

Every attempt is a line of the answer: {"what": ..., "got": "refused" or what it got}.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path


def attempt(what: str, act: Callable[[], object]) -> dict[str, str]:
    """One line of the answer."""
    try:
        return {"what": what, "got": str(act())}
    except PermissionError:
        return {"what": what, "got": "refused"}
    except OSError as error:
        return {"what": what, "got": repr(error)}


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)
    return "connected"


def call(port: int, method: str, path: str, headers: dict[str, str]) -> str:
    """The status of a call, and what the server says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body=b"" if method == "GET" else b"{}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    return "refused" if answer.status == 401 else f"{answer.status} {text}"


def main() -> None:
    user, goal = int(sys.argv[1]), json.load(sys.stdin)
    socket.getaddrinfo("127.0.0.1", 80)  # loads what the new user may not be able to load
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    tried = [attempt("setuid 0", lambda: os.setuid(0))]
    for path in goal["sockets"]:
        tried.append(attempt(f"connect {path}", lambda path=path: connect(path)))
        tried.append(attempt(f"unlink {path}", lambda path=path: os.unlink(path)))
    for path in goal["folders"]:
        tried.append(attempt(f"list {path}", lambda path=path: os.listdir(path)))
        tried.append(attempt(f"write in {path}", lambda path=path: Path(path, "planted").write_text("")))
        tried.append(attempt(f"rename {path}", lambda path=path: os.rename(path, f"{path}_away")))
    for path in goal["files"]:
        tried.append(attempt(f"read {path}", lambda path=path: Path(path).read_bytes()))
    for process in goal["processes"]:
        for name in ("environ", "maps", "mem"):
            tried.append(attempt(name, lambda path=f"/proc/{process}/{name}": os.open(path, os.O_RDONLY)))
        tried.append(attempt("fd", lambda p=process: os.listdir(f"/proc/{p}/fd")))
        tried.append({"what": "cmdline", "got": Path(f"/proc/{process}/cmdline").read_text()})
    for port in goal["ports"]:
        for method, path in goal["calls"]:
            for headers in goal["headers"]:
                what = f"{method} {path} {sorted(headers.values())}"
                tried.append(attempt(what, lambda *a, p=port, c=(method, path, headers): call(p, *c)))
    print(json.dumps(tried))


if __name__ == "__main__":
    main()
