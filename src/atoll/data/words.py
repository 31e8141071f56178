"""Parse what is written as `name:VALUE:VALUE`: partitions and shifts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from atoll.kernel.errors import PartitionError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Word(Generic[T]):
    """A word of the language of partitions: how it is written, what it means, and what builds it from its values."""

    written: str  # name:VALUE, with [:VALUE] for those that may be left out
    meaning: str
    build: Callable[..., T]
    values: str = ""  # as a message names them
    example: str = ""
    types: tuple[Callable[[str], Any], ...] = ()

    def parse(self, text: str) -> T:
        """Build what `text` names, with its values."""
        name, *given = text.split(":")
        if given and not self.types:
            raise PartitionError(f"`{name}` must be written without a value. Got {text!r} instead.")
        needed = len(self.types) - self.written.count("[")
        try:
            if not needed <= len(given) <= len(self.types):
                raise ValueError
            values = [convert(value) for convert, value in zip(self.types, given, strict=False)]
        except ValueError:
            raise PartitionError(
                f"`{name}` must be followed by {self.values}. Got {text!r} instead.",
                hint=f"write for example {self.example}.",
            ) from None
        return self.build(*values)


def parse_word(kind: str, text: str, words: Mapping[str, Word[T]]) -> T:
    """Build what `text` says in one of these words."""
    text = text.strip()
    name = text.partition(":")[0]
    if name not in words:
        raise unknown(kind, name, words)
    return words[name].parse(text)
