"""A site on a network: it answers what the server asks, from its own data, for as long as the federation lasts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from atoll.deploy import messages
from atoll.deploy.keys import Key
from atoll.deploy.messages import Message
from atoll.deploy.network import Node, describe_work, read_question
from atoll.deploy.site import Site
from atoll.kernel.errors import PayloadError

log = logging.getLogger("atoll.deploy")

NOBODY = "0" * 32  # the federation of a site that joins one
Prepare = Callable[[Mapping[str, Any]], int]  # from what the server says to how many clients there are; or it raises
OnResult = Callable[[Message, bytes], None]  # the last job, and the reply to it


class Attendant:
    """Answers the envelopes of a server: jobs are the site's, everything else is here."""

    def __init__(self, key: Key, site: Site, prepare: Prepare, on_result: OnResult, *, stay: bool = False) -> None:
        self.key, self.site, self.stop = key, site, threading.Event()
        self._prepare, self._on_result, self._stay = prepare, on_result, stay

    def attend(self, node: Node) -> None:
        """Answer until the federation is over."""
        node.serve(self.answer, self.stop)

    def answer(self, envelope: bytes) -> bytes:
        """Return the answer to an envelope; raise, with the reason, where there is none."""
        question = read_question(envelope)
        if question is None:
            return self._do_job(envelope)
        if question["say"] == "join":
            clients = self._prepare(question)
            log.info("joining with %d client(s)", clients)
            return messages.write(
                "join", self.key, federation=NOBODY, number=0, round=0, about={"clients": clients}, tree=None
            )
        if question["say"] == "done":
            log.info("the federation is over")
            if not self._stay:
                self.stop.set()
            return b"{}"
        raise PayloadError(f"The server must say join or done. It says {question['say'][:40]!r}.")

    def _do_job(self, envelope: bytes) -> bytes:
        message = messages.read(envelope, "The job")
        begun = time.monotonic()
        reply = self.site.answer_message(message)
        header = message.header
        what = describe_work([str(one["phase"]) for one in header.about["phases"]], header.round)
        log.info(
            "%s: done in %.1f s; %s bytes arrived, %s leave", what, time.monotonic() - begun, f"{len(envelope):,}",
            f"{len(reply):,}",
        )  # fmt: skip
        if (
            header.round >= header.about["terms"]["rounds"]
        ):  # before the reply leaves: a site that is killed does it again
            self._on_result(message, reply)
        return reply
