"""The channel between server and clients: every message goes through a `Channel`, which writes it in a `Ledger`."""

from atoll.runtime.channel.channel import Channel, Clip, Stage
from atoll.runtime.channel.ledger import Entry, Ledger, Message

__all__ = ["Channel", "Clip", "Entry", "Ledger", "Message", "Stage"]
