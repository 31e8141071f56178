"""Writing beside the work: what a run writes down goes to disk in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

log = logging.getLogger("atoll.run")


class Writer:
    """Writes in another thread what it is given, one after the other, and nothing more after a failure.

    On a GPU it reads tensors in a stream of its own, as they are when they are handed over, so training goes on
    meanwhile. What is handed over must not be changed in place afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.Queue[tuple[torch.cuda.Event | None, Callable[[], None]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None  # started with the first task
        self._failure: BaseException | None = None

    def put(self, write: Callable[[], None]) -> None:
        """Have something written after all that was given before; raise what earlier writing ended with."""
        self._require_success()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="atoll-writer")
            self._thread.start()
        on_gpu = self._device.type == "cuda"
        self._tasks.put((torch.cuda.current_stream(self._device).record_event() if on_gpu else None, write))

    def wait(self) -> None:
        """Return when all is written; raise what writing ended with."""
        self._tasks.join()
        self._require_success()

    def close(self, error: BaseException | None = None) -> None:
        """End when all is written; raise what writing ended with, unless the run already ends with an `error`.

        An interruption meanwhile leaves out what has not begun: the file under way is finished, as until then nobody
        else may write to the folder.
        """
        interruption: KeyboardInterrupt | None = None
        self._tasks.put(None)
        while self._thread is not None and self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as again:
                self._failure = interruption = again
        if interruption is not None:
            raise interruption
        if error is None:
            self._require_success()
        elif self._failure not in (None, error):
            log.error("the run could not be written: %s", self._failure)

    def _require_success(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while (task := self._tasks.get()) is not None:
                ready, write = task
                try:
                    if self._failure is None:
                        if stream is not None and ready is not None:
                            stream.wait_event(ready)
                        write()
                except BaseException as error:  # noqa: BLE001 - whatever it is, the run ends with it
                    self._failure = error
                finally:
                    del task, write  # with all that the task holds
                    self._tasks.task_done()
