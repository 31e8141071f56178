"""Methods made of methods: pieces (`fedper+prox`), hybrids (`ditto@ifca`), architectures; and methods by name."""

from atoll.compose.names import as_method, create, from_record, read, to_record, upgrade_record

__all__ = ["as_method", "create", "from_record", "read", "to_record", "upgrade_record"]
