"""The process in which verifiers run: JSON lines in, JSON lines out.

The first line holds the rewards' names, the task's spec and a time limit; the answer is their provenance, or `fatal`
with a sentence for the user. Each later line is a completion for one reward; the answer is its `score` or an `error`.
"""

import contextlib
import faulthandler
import json
import math
import numbers
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO

from algorithms.rewards.verifiers import Verifier, provenance, verifier
from fncore.errors import UserError


def main() -> None:
    """Serve until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what an interrupt means.
    requests, replies = _take_pipes()
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()

    setup = json.loads(lines.get())
    try:
        verifiers = [verifier(name, setup["task"]) for name in setup["rewards"]]
    except UserError as error:
        _write(replies, {"fatal": str(error)})
        return
    _write(replies, {"provenance": [provenance(name) for name in setup["rewards"]]})
    with open(os.devnull, "w") as nowhere:
        while True:
            request = json.loads(lines.get())
            # A thread in C ends a process that outlived its parent while a computation holds the interpreter's lock.
            faulthandler.dump_traceback_later(setup["limit"], exit=True, file=nowhere)
            reply = _run(verifiers[request["reward"]], request)
            faulthandler.cancel_dump_traceback_later()
            _write(replies, reply)


def _take_pipes() -> tuple[TextIO, TextIO]:
    """Keep the two pipes for the protocol and leave verifiers an empty input and the error stream to print to."""
    sys.stdout.flush()
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nowhere:
        os.dup2(nowhere.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _read(requests: TextIO, lines: queue.Queue[str]) -> None:
    for line in requests:
        lines.put(line)
    os._exit(0)


def _run(verify: Verifier, request: dict[str, Any]) -> dict[str, Any]:
    try:
        score = verify(request["prompt"], request["completion"], request["answer"], request["index"])
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            return {"error": f"returned {score!r:.200}, expected a finite number"}
        return {"score": float(score)}
    except BaseException as error:
        return {"error": f"raised {type(error).__name__}: {error!s:.500}"}


def _write(replies: TextIO, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        replies.write(json.dumps(message) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
