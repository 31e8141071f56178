"""The log of a run: what Atoll logs while it is under way, written to its run.log."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.records.files import open_to_append, writing

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_threads: dict[logging.Handler, int] = {}  # of the runs whose logs are open
_levels: list[int] = []  # the level before the first of them was opened


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write what Atoll logs to a file as well; where runs are side by side, not what happens in another's thread."""
    logger, mine = logging.getLogger("atoll"), threading.get_ident()
    with writing(path.parent):
        stream = open_to_append(path)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(lambda record: record.thread == mine or record.thread not in _threads.values())
    if not _threads:
        _levels.append(logger.level)
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    _threads[handler] = mine
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        del _threads[handler]
        if not _threads:
            logger.setLevel(_levels.pop())
        handler.close()
        stream.close()
