"""Methods made of methods: pieces (`fedper+prox`), hybrids (`ditto@ifca`), architectures; and methods by name."""

from atoll.compose.names import create, from_record, read, to_record, upgrade_record

__all__ = ["create", "from_record", "read", "to_record", "upgrade_record"]
