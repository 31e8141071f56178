"""Ctrl-C and SIGTERM: a run ends after its round, so nothing is lost."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("atoll.federation")


@contextmanager
def interruptions(*, enabled: bool) -> Iterator[threading.Event]:
    """Set an event on Ctrl-C or SIGTERM, so the round can finish; a second signal stops at once."""
    stop = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        log.warning("stopping after this round; interrupt again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
