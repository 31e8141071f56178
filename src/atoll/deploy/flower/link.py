"""The server's side: Flower's fleet interface alone, over TLS, and the messages that wait there.

`flower-superlink` offers three interfaces on one port: Fleet for nodes, Control for who registers keys and starts runs,
Runtime for programs. Control has no login in the open-source version, so whoever reaches the port may run code on every
node. A `Link` therefore serves the fleet's routes only, from this process. Keys are registered by putting a file in a
folder, and the one run there is belongs to this process and ends with it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from atoll.deploy.flower.wire import BODY, MESSAGE_TYPE, inflate, list_objects, pack, require_flower, unpack
from atoll.deploy.network import Arrived, Missing
from atoll.kernel.errors import DeployError, PayloadError

require_flower()

import anyio.to_thread  # noqa: E402
import uvicorn  # noqa: E402
from fastapi import FastAPI, Request, Response  # noqa: E402
from flwr.app.message import remove_content_from_message  # noqa: E402
from flwr.app.message.message import make_message  # noqa: E402
from flwr.app.metadata import Metadata  # noqa: E402
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, ErrorCode  # noqa: E402
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState  # noqa: E402
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType  # noqa: E402
from flwr.supercore.error import ApiErrorCode, FlowerError, http_error_translator  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore  # noqa: E402
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware  # noqa: E402
from flwr.superlink.federation import NoOpFederationManager  # noqa: E402
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware  # noqa: E402
from flwr.superlink.routers.fleet.router import router as fleet_router  # noqa: E402
from starlette.middleware import Middleware  # noqa: E402
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint  # noqa: E402

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.proto.message_pb2 import ObjectTree
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("atoll.deploy")

STILL_CONNECTED = "still connected"
OPEN = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "push-object",
        "pull-object", "confirm-message-received",
    )
)  # fmt: skip


@dataclass(frozen=True)
class _Sent:
    """A message that waits for its reply, and how often the node had joined when it was sent."""

    message: str
    process: int


class Link:
    """Where sites fetch their messages and bring their replies."""

    def __init__(
        self,
        address: tuple[str, int],
        sites: Mapping[str, bytes],
        certificate: tuple[Path, Path] | None,
        *,
        patience: float = 10.0,
        hold: float = 4.0,
        largest: int = 2**30,
    ) -> None:
        """Prepare to listen at `address`; `sites` are the public keys, by name.

        Without a `certificate` (a file of it and one of its key) nothing is encrypted. A site that is not heard of for
        `patience` seconds counts as gone. A site's question for messages is kept open for `hold` seconds, so one that
        comes is there at once. No message may have more than `largest` bytes.
        """
        self.patience, self.largest, self._certificate = patience, largest, certificate
        self._state = _State(patience, hold, largest)
        self._nodes = {name: self._state.admit(key) for name, key in sites.items()}
        self._run = self._state.begin_run()
        self._socket = _listen(address)
        self.host, self.port = self._socket.getsockname()[:2]
        self._server = uvicorn.Server(self._configure(len(sites)))
        self._thread = threading.Thread(target=self._serve, name="atoll link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise DeployError(f"The server could not listen at {self.host}:{self.port}.")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.close()
        self._server.should_exit = True
        self._thread.join(timeout=10)

    @property
    def sites(self) -> list[str]:
        """The names of all sites that may take part."""
        return list(self._nodes)

    def connected(self) -> set[str]:
        """Return the names of the sites that are there now."""
        return {name for name, node in self._nodes.items() if self._state.is_online(node)}

    def count_connections(self, site: str) -> int:
        """Return how often a site has connected: a process that is started again connects again."""
        return self._state.joined[self._nodes[site]]

    def exchange(self, envelopes: Mapping[str, bytes], *, timeout: float, grace: float) -> Iterator[Arrived | Missing]:
        """Send each site its envelope and yield the replies as they come, and who is missing.

        A site that is not there is waited for, `grace` seconds; one that comes back is sent its envelope again. After
        `timeout` seconds whoever has not replied is missing, and a reply that comes later is refused.
        """
        begun = time.monotonic()
        gone = dict.fromkeys(envelopes, begun)  # who is not there, and since when
        sent: dict[str, _Sent] = {}
        coming: dict[str, Message] = {}  # replies whose bytes are not all here
        try:
            while gone or sent.keys() - gone.keys():
                for name in envelopes.keys() & (gone.keys() | sent.keys()):
                    if self._keep_asking(name, envelopes[name], sent, gone, timeout):
                        coming.pop(name, None)  # of a process that ended while it replied
                for name, found in self._look({name: one.message for name, one in sent.items() if name not in gone}):
                    if isinstance(found, str):
                        self._state.forget(sent.pop(name).message)
                        yield Missing(name, found)
                    elif found is None:
                        gone[name] = time.monotonic()
                    else:
                        coming[name] = found
                for name, reply in list(coming.items()):
                    outcome = self._take(name, reply)
                    if outcome is not None:
                        del coming[name]
                        gone.pop(name, None)
                        self._state.forget(sent.pop(name).message)
                        yield outcome
                    elif not self._state.is_online(self._nodes[name]):  # it may go on: Flower tells of a reply once
                        gone.setdefault(name, time.monotonic())
                now = time.monotonic()
                for name in [*(sent.keys() | gone.keys())]:
                    since, late = gone.get(name), now - begun > timeout
                    if late or (since is not None and now - since > grace):
                        reason = (
                            f"no reply within {timeout:g} s"
                            if since is None
                            else f"not connected for {now - since:.0f} s"
                        )
                        gone.pop(name, None)
                        coming.pop(name, None)
                        if name in sent:
                            self._state.forget(sent.pop(name).message)
                        yield Missing(name, reason)
                if sent or gone:
                    self._state.wait_for_replies(0.2)
        finally:
            for one in sent.values():
                self._state.forget(one.message)

    def _keep_asking(
        self, name: str, envelope: bytes, sent: dict[str, _Sent], gone: dict[str, float], timeout: float
    ) -> bool:
        """Send a site its envelope when it is there; again, if it is another process than the one that had it."""
        node = self._nodes[name]
        if not self._state.is_online(node):
            return False
        process = self._state.joined[node]
        if name in sent and sent[name].process != process:
            self._state.forget(sent.pop(name).message)
        new = name not in sent
        if new:
            sent[name] = _Sent(self._state.post(self._run, node, envelope, timeout + 3600), process)
        gone.pop(name, None)
        return new

    def _look(self, sent: Mapping[str, str]) -> Iterator[tuple[str, Message | str | None]]:
        """Yield what is new: a reply, why there is none, or None for a site that is gone."""
        if not sent:
            return
        names = {message: name for name, message in sent.items()}
        for reply in self._state.get_message_res(set(names), self._run):
            name = names[reply.metadata.reply_to_message_id]
            if not reply.has_error():
                yield name, reply
                continue
            self._state.object_store.delete(reply.metadata.message_id)  # Flower keeps a copy of what it says itself
            if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                yield name, None
            else:
                yield name, reply.error.reason or "failed without saying why"

    def _take(self, name: str, reply: Message) -> Arrived | Missing | None:
        """Return what a reply brings; None while its bytes are not all here."""
        try:
            objects = self._state.collect(self._run, reply.metadata.message_id)
            if objects is None:
                return None
            return Arrived(name, unpack(inflate(reply.metadata.message_id, objects)))
        except PayloadError as error:
            return Missing(name, str(error))

    def _configure(self, sites: int) -> uvicorn.Config:
        certificate, key = self._certificate or (None, None)
        return uvicorn.Config(
            _fleet_only(self._state, sites), log_config=None, access_log=False, lifespan="on", server_header=False,
            limit_concurrency=64 + 8 * sites, timeout_keep_alive=60, timeout_graceful_shutdown=1, ws="none",
            loop="asyncio", http="h11", ssl_certfile=certificate, ssl_keyfile=None if key is None else str(key),
        )  # fmt: skip

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()


class _State(InMemoryLinkState):
    """Flower's list of nodes and messages, in this process, with what a long-lived node and bounded sizes need."""

    def __init__(self, patience: float, hold: float, largest: int) -> None:
        super().__init__(NoOpFederationManager(), InMemoryObjectStore())
        self._patience, self._hold, self._largest = patience, hold, largest
        self._posted, self._replied, self._closing = threading.Condition(), threading.Event(), False
        self.joined: Counter[int] = Counter()  # by node; a restarted process joins again

    # -- what the link does --------------------------------------------------------------------------------------------

    def admit(self, public_key: bytes) -> int:
        """Register the key of a site; return the number of its node."""
        return int(self.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, 0))

    def begin_run(self) -> int:
        """Begin the one run there is; return its number."""
        number = self.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )  # fmt: skip
        task = self.run_ids[number].run.primary_task_id
        assert task is not None
        self.claim_task(task)
        self.activate_task(task)
        return int(number)

    def is_online(self, node: int) -> bool:
        """Return whether a node has been heard of lately."""
        return bool(self.get_node_info(node_ids=[node], statuses=[NodeStatus.ONLINE]))

    def post(self, run: int, node: int, envelope: bytes, ttl: float) -> str:
        """Lay an envelope out for a node; return the message's name."""
        from flwr.supercore.date import now

        metadata = Metadata(
            run_id=run, message_id="", src_node_id=SUPERLINK_NODE_ID, dst_node_id=node, reply_to_message_id="",
            group_id="", created_at=now().timestamp(), ttl=ttl, message_type=MESSAGE_TYPE,
        )  # fmt: skip
        message = make_message(metadata=metadata, content=pack(envelope))
        name = message.object_id
        message.metadata.__dict__["_message_id"] = name
        objects = {key: one.deflate() for key, one in get_all_nested_objects(message).items()}
        with self._posted:  # nobody sees a message before its bytes are there
            session = self.start_session(run)
            stored, missing = self.store_message_and_object_tree(
                remove_content_from_message(message), get_object_tree(message), session
            )
            if not stored:
                raise DeployError(f"Flower does not take a message for node {node}.")
            for key in missing:
                self.store_object(run, session, key, objects[key])
            self._posted.notify_all()
        return str(name)

    def collect(self, run: int, message: str) -> dict[str, bytes] | None:
        """Return the bytes of a reply by object; None while some are missing."""
        from flwr.supercore.object_store import NoObjectInStoreError

        try:
            names = list_objects(self.object_store.get_object_tree(message), self._largest)
        except NoObjectInStoreError:
            raise PayloadError("A reply was given up while it was being sent.") from None
        found = {name: self.get_object(run, name) or b"" for name in names}
        return found if all(found.values()) else None

    def forget(self, message: str) -> None:
        """Remove a message, and the reply to it if there is one."""
        reply = self.message_ins_id_to_message_res_id.get(message)
        self.delete_messages({message})
        self.object_store.delete(message)
        if reply is not None:
            self.object_store.delete(reply)

    def wait_for_replies(self, seconds: float) -> None:
        """Wait until something arrives, or some seconds."""
        self._replied.wait(seconds)
        self._replied.clear()

    def close(self) -> None:
        """Answer all nodes that wait for messages: there are none."""
        with self._posted:
            self._closing = True
            self._posted.notify_all()

    # -- what Flower's handlers call -----------------------------------------------------------------------------------

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return what waits for a node; if nothing does, wait a little for something to come.

        A question that is still open when the node joins again gets nothing: whoever asked it has ended.
        """
        until = time.monotonic() + self._hold
        with self._posted:
            process = self.joined[node_id]
            while True:
                if self.joined[node_id] != process:
                    return []
                found = super().get_message_ins(node_id, limit, run_id=run_id)
                left = until - time.monotonic()
                if found or left <= 0 or self._closing:
                    return list(found)
                self._posted.wait(left)

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """Take a message unless it announces too many bytes."""
        try:
            list_objects(object_tree, self._largest)
        except PayloadError as error:
            raise FlowerError(
                ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, str(error), public_details=str(error)
            ) from None
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        return bool(stored), list(missing)

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        """Take some bytes of a message, and tell who waits for them."""
        stored = super().store_object(run_id, session_id, object_id, object_content)
        self._replied.set()
        return bool(stored)

    def store_message_res(self, message: Message) -> str | None:
        """Take a reply, and tell who waits for it."""
        name = super().store_message_res(message)
        self._replied.set()
        return None if name is None else str(name)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a node in; one that is there already is refused in words of its own."""
        if super().activate_node(node_id, self._patience / 2):
            with self._posted:
                self.joined[node_id] += 1
                self._posted.notify_all()
            self._replied.set()
            return True
        raise FlowerError(
            ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, f"node {node_id} is online", public_details=STILL_CONNECTED
        )

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Note that a node is there; how long that holds is for the server to say."""
        return bool(super().acknowledge_node_heartbeat(node_id, self._patience / 2))

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Keep the run: it lives as long as this process."""


class _Gate:
    """Lets through what nodes ask for, in requests of a bounded size that is said beforehand."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http" or scope["path"] not in OPEN or scope["method"] != "POST":
            return await _refuse(send, 404, b"nothing is here")
        size = dict(scope["headers"]).get(b"content-length", b"")
        if not size.isdigit():
            return await _refuse(send, 411, b"the size of a request must be said")
        if int(size) > BODY:
            return await _refuse(send, 413, b"the request is too large")
        return await self.app(scope, receive, send)


async def _refuse(send: Send, status: int, text: bytes) -> None:
    size = str(len(text)).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", size), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _fleet_only(state: _State, sites: int) -> FastAPI:
    """Return the fleet interface of Flower, with node authentication, and nothing else."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 40 + 2 * sites  # each may wait for messages
        yield

    stack: Sequence[Middleware] = [
        Middleware(_Gate),
        Middleware(BaseHTTPMiddleware, dispatch=_translate_errors),
        Middleware(ProtobufTranslationMiddleware),
        Middleware(NodeAuthMiddleware),
    ]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, middleware=list(stack))
    app.state.linkstate_factory = _Fixed(state)
    app.state.enable_supernode_auth = True
    app.include_router(fleet_router)
    return app


async def _translate_errors(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Answer errors as Flower does; what its handlers stumble over is a request that makes no sense."""
    answer = await http_error_translator(request, call_next)
    if answer.status_code == 500:
        log.warning("a request at %s made no sense", request.url.path)
        return Response("the request makes no sense", status_code=400, media_type="text/plain")
    return answer


class _Fixed:
    """Gives Flower's handlers the one state there is."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def state(self) -> _State:
        return self._state


def _listen(address: tuple[str, int]) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=256)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for company
        return listening
    except OSError as error:
        raise DeployError(
            f"The server must be able to listen at {address[0]}:{address[1]}. {error.strerror or error}.",
            hint="choose another address with `listen`, or end what uses this one.",
        ) from None
