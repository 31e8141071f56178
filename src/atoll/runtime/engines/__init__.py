"""Engines run a method's local work on clients; one interface, `run`, whatever the hardware."""

from atoll.runtime.engines.local import LocalEngine

__all__ = ["LocalEngine"]
