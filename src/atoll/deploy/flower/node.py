"""A site's side: one process that stays connected, fetches envelopes, answers them, and never runs what it is sent."""

from __future__ import annotations

import email.utils
import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.deploy.flower.wire import BODY, inflate, list_objects, pack, require_flower, unpack
from atoll.kernel.errors import AtollError, DeployError, PayloadError, first_line

require_flower()

import httpx  # noqa: E402
from flwr.app import Error, Message  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL, SYSTEM_TIME_TOLERANCE, ErrorCode  # noqa: E402
from flwr.common.serde import message_from_proto, message_to_proto  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest  # noqa: E402
from flwr.proto.message_pb2 import (  # noqa: E402
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node as NodeNumber  # noqa: E402
from flwr.supercore.error import FlowerError  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

log = logging.getLogger("atoll.deploy")

STILL_CONNECTED = "still connected"
Answer = Callable[[bytes], bytes]


class Node:
    """A site's connection to its server."""

    def __init__(
        self,
        server: str,
        key: ec.EllipticCurvePrivateKey,
        authority: Path | None,
        *,
        largest: int = 2**30,
        retry: float = 1.0,
        beat: float = 2.0,
    ) -> None:
        """Prepare to talk to `server`, as HOST:PORT; without the certificate of an `authority`, in plain text.

        A lost connection is tried again every `retry` seconds. A sign of life is sent every `beat` seconds.
        """
        self.server, self.authority, self.largest, self.retry, self.beat = server, authority, largest, retry, beat
        self._public = public_key_to_bytes(key.public_key())
        self._client = FleetHttpClient.from_server_address(
            server, authority is None, None if authority is None else authority.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())],
        )  # fmt: skip
        http = self._client._client  # Flower offers no way to bound what it reads
        http.event_hooks = {"response": [_refuse_large]}
        http.follow_redirects = False
        self._node: NodeNumber | None = None
        self._beating = threading.Lock()  # a sign of life after a goodbye would make the server see a connection

    def serve(self, answer: Answer, stop: threading.Event) -> None:
        """Answer envelopes until `stop` is set, whatever happens to the connection in between."""
        beating = threading.Thread(target=self._beat, args=(stop,), name="atoll heartbeat", daemon=True)
        beating.start()
        waiting = ""
        try:
            while not stop.is_set():
                try:
                    if self._node is None:
                        self._join()
                        log.info("connected to %s", self.server)
                        waiting = ""
                    self._answer_next(answer)
                except (httpx.HTTPError, FlowerError, PayloadError, ssl.SSLError) as error:
                    reason = self._explain(error)  # raises if waiting does not help
                    if reason and reason != waiting:
                        log.warning("%s; trying again", reason)
                        waiting = reason
                    self._leave()  # a message or a reply may be lost: the server sends it again to who joins again
                    stop.wait(self.retry)
        finally:
            self._leave()
            stop.set()
            self._client.close()

    def _join(self) -> None:
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
        self._node = NodeNumber(node_id=self._client.ActivateNode(request).node_id)

    def _leave(self) -> None:
        with self._beating:
            node, self._node = self._node, None
            if node is not None:
                try:
                    self._client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
                except httpx.HTTPError:  # the server will notice
                    return

    def _beat(self, stop: threading.Event) -> None:
        """Show that this site is alive, also while it trains."""
        while not stop.wait(self.beat):
            with self._beating:
                if self._node is None:
                    continue
                try:
                    self._client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
                    )
                except (httpx.HTTPError, RuntimeError, PayloadError):  # the main loop finds out why
                    continue

    def _answer_next(self, answer: Answer) -> None:
        """Fetch one message, if there is one, and answer it."""
        found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            message = message_from_proto(proto)
            begun = time.monotonic()
            try:
                envelope = self._fetch(message, tree)
                reply = Message(pack(answer(envelope)), reply_to=message)
            except httpx.HTTPError:
                raise
            except AtollError as error:
                log.error("%s", error)
                reply = _report(message, str(error))
            except OSError as error:  # a full disk, most likely
                log.error("%s", error)
                reply = _report(message, f"this site cannot work: {error.strerror or error}")
            except Exception as error:
                log.exception("an answer failed")
                reply = _report(message, f"this site failed: {type(error).__name__}: {first_line(error)}")
            try:
                self._send(reply, time.monotonic() - begun)
            except httpx.HTTPStatusError as error:
                told = FlowerError.from_json(error.response.text)
                if told is None or not told.public_details:
                    raise
                log.error("the server refuses the answer: %s", told.public_details)
                self._send(_report(message, told.public_details), 0.0)

    def _fetch(self, message: Message, tree: ObjectTree) -> bytes:
        name, run = message.metadata.message_id, message.metadata.run_id
        objects = {}
        for one in list_objects(tree, self.largest):
            part = self._client.PullObject(PullObjectRequest(node=self._node, run_id=run, object_id=one))
            if not part.object_available:
                raise PayloadError("A message was withdrawn while it was fetched.")
            objects[one] = part.object_content
        envelope = unpack(inflate(name, objects))
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
        )
        return envelope

    def _send(self, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
        tree, run = get_object_tree(reply), reply.metadata.run_id
        bare = remove_content_from_message(reply) if reply.has_content() else reply
        asked = self._client.PushMessages(
            PushMessagesRequest(
                node=self._node, messages_list=[message_to_proto(bare)], message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
        )  # fmt: skip
        for name in asked.objects_to_push:
            self._client.PushObject(
                PushObjectRequest(
                    node=self._node, run_id=run, session_id=asked.session_id, object_id=name,
                    object_content=objects[name],
                )
            )  # fmt: skip

    def _explain(self, error: Exception) -> str:
        """Return why there is no connection, in words; raise if it will not come by itself."""
        if isinstance(error, httpx.HTTPStatusError):
            return self._explain_refusal(error.response)
        if isinstance(error, PayloadError):
            return str(error)
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            if "mismatch" in text:
                raise DeployError(
                    f"The server's certificate must be made out to the name it is called by, {self.server}.",
                    hint="make it with `atoll deploy keys --host NAME` for each name and address of the server.",
                )
            raise DeployError(
                f"The server's certificate must be signed by the authority in {self.authority}. The one of "
                f"{self.server} is not, or has expired.",
                hint="use the ca.crt that came with this site's key; do not go on if nobody changed the server.",
            )
        if any(word in text for word in ("WRONG_VERSION_NUMBER", "SSL", "TLS")):
            raise DeployError(
                f"The server must speak TLS. {self.server} answers in plain text.",
                hint="start the server with its certificate, or both sides with `insecure`.",
            )
        if isinstance(error, httpx.RemoteProtocolError) and self.authority is None:
            raise DeployError(
                f"The server at {self.server} does not answer in plain text.", hint="leave out `insecure`."
            )
        return f"no connection to {self.server} ({type(error).__name__})"

    def _explain_refusal(self, response: httpx.Response) -> str:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._node = None
            ahead = _seconds_ahead(response)
            if ahead is not None and not -300 < ahead < SYSTEM_TIME_TOLERANCE:
                direction = "ahead of" if ahead > 0 else "behind"
                raise DeployError(
                    f"This machine's clock must agree with the server's to a few seconds. It is {abs(ahead):.0f} s "
                    f"{direction} it.",
                    hint="set the clock, for example with NTP.",
                )
            return "the server has started anew"
        told = FlowerError.from_json(response.text)
        if told is not None and told.public_details == STILL_CONNECTED:
            return (
                "the server still sees a connection of this site: another process uses its key, or one ended just now"
            )
        if told is not None and response.request.url.path.endswith("/activate-node"):
            raise DeployError(
                f"The server must know this site's key. {self.server} does not.",
                hint="send the operator NAME.pub, which belongs in sites/ of the server's keys, and have the server "
                "started again.",
            )
        if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            raise DeployError(f"{self.server} refuses: {response.text[:200]}.")
        return f"the server refuses ({response.status_code})"


def _report(message: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason[:2000]), reply_to=message)


def _refuse_large(response: httpx.Response) -> None:
    """Raise before the body of a response is read if it is too large."""
    size = response.headers.get("content-length", "")
    if not size.isdigit() or int(size) > BODY:
        response.close()
        raise PayloadError(f"An answer of the server must say its size, at most {BODY:,} bytes. It says {size!r}.")


def _seconds_ahead(response: httpx.Response) -> float | None:
    """Return how far this machine's clock is ahead of the server's."""
    try:
        there = email.utils.parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError):
        return None
    return time.time() - there.timestamp()
