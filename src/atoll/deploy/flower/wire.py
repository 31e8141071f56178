"""How an envelope lies in a message of Flower: one array of bytes, which Flower cuts into chunks of 5 MiB."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from atoll.kernel.errors import DeployError, PayloadError

# Flower asks its makers for news and counts its users unless told not to; this must be said before it is imported.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.proto.message_pb2 import ObjectTree

SERIES = "1.41."  # Flower changes its interface from release to release
CHUNK = 5 * 2**20  # as Flower cuts arrays
BODY = CHUNK + 2**20  # the largest request or response: a chunk and what names it
MESSAGE_TYPE = "query.atoll"


def require_flower() -> None:
    """Raise unless the Flower that this adapter is written for is installed; silence its log."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise DeployError(
            "Sites on a network need Flower, which is not installed.", hint="pip install 'atoll[deploy]'"
        ) from None
    if not found.startswith(SERIES):
        raise DeployError(
            f"Sites on a network need Flower {SERIES}x. Version {found} is installed.",
            hint="pip install 'atoll[deploy]'",
        )
    import flwr.supercore.logger  # noqa: F401 - sets its own level when it is imported

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what it says is said in our words
    logging.getLogger("httpx").setLevel(logging.WARNING)


def pack(envelope: bytes) -> RecordDict:
    """Return an envelope as the content of a message."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(envelope),), stype="atoll.envelope", data=envelope)
    return RecordDict({"atoll": ArrayRecord({"envelope": array})})


def unpack(message: Message) -> bytes:
    """Return the envelope in a message; raise if there is none."""
    try:
        return message.content.array_records["atoll"]["envelope"].data
    except KeyError:
        raise PayloadError("A message must carry an envelope of Atoll. This one does not.") from None


def inflate(message_id: str, objects: dict[str, bytes]) -> Message:
    """Put a message together from its objects; raise if they do not fit."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        found = inflate_object_from_contents(message_id, objects)
    except Exception as error:  # noqa: BLE001 - anything may be in there
        raise PayloadError(f"A message cannot be put together: {type(error).__name__}.") from None
    return cast("Message", found)


def list_objects(tree: ObjectTree, largest: int) -> list[str]:
    """List the objects of a message; raise if there are more than `largest` bytes can need."""
    most = largest // CHUNK + 8  # chunks, and array, records, message
    found: list[str] = []
    left = [tree]
    while left:
        one = left.pop()
        found.append(one.object_id)
        left.extend(one.children)
        if len(found) + len(left) > most:
            raise PayloadError(f"A message must have at most {largest:,} bytes. This one announces more.")
    return found
