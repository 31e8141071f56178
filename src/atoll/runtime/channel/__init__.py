"""The channel between server and clients: every message goes through a `Channel`, which writes it in a `Ledger`."""

from atoll.runtime.channel.channel import Channel
from atoll.runtime.channel.ledger import Entry, Ledger, Message
from atoll.runtime.channel.protection import Adder, Protection
from atoll.runtime.channel.stages import Clip, Place, Sent, Stage

__all__ = ["Adder", "Channel", "Clip", "Entry", "Ledger", "Message", "Place", "Protection", "Sent", "Stage"]
