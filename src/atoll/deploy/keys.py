"""Keys of sites and coordinators: Ed25519 pairs that sign every message.

A key is two files: `north.key`, which stays where it is, and `north.pub`, which is shown to the others.
"""

from __future__ import annotations

import binascii
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.kernel.errors import DeployError
from atoll.runtime.files import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LARGEST = 4096  # bytes of a key's file


@dataclass(frozen=True)
class PublicKey:
    """Who somebody is: a name, and the key that their signatures are checked with."""

    name: str
    value: bytes  # 32 of them

    def verify(self, signature: bytes, signed: bytes) -> bool:
        """Return whether a signature is that of this key."""
        ed25519, invalid = _library()
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(self.value).verify(signature, signed)
        except (invalid, ValueError):
            return False
        return True

    def __str__(self) -> str:
        """Return the key as it stands in its file."""
        return f"atoll-ed25519 {self.value.hex()} {self.name}"


@dataclass(frozen=True)
class Key:
    """A key that signs, and the name of who holds it."""

    name: str
    secret: bytes

    @classmethod
    def make(cls, name: str) -> Key:
        """Make a new key."""
        require_name(name)
        ed25519, _ = _library()
        return cls(name, ed25519.Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> PublicKey:
        """What others may know of it."""
        return PublicKey(self.name, self._signer.public_key().public_bytes_raw())

    @property
    def _signer(self) -> Ed25519PrivateKey:
        signer: Ed25519PrivateKey = _library()[0].Ed25519PrivateKey.from_private_bytes(self.secret)
        return signer

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message: 64 bytes."""
        return self._signer.sign(message)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both files of the key, the secret one for this user only; none may be there yet."""
        folder.mkdir(parents=True, exist_ok=True)
        secret, public = folder / f"{self.name}.key", folder / f"{self.name}.pub"
        for path, text, mode in ((secret, f"atoll-ed25519-secret {self.secret.hex()} {self.name}", 0o600),
                                 (public, str(self.public), 0o644)):  # fmt: skip
            try:
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError as error:
                raise DeployError(
                    f"A key must not replace another one. {path} is there already.",
                    hint="choose another name, or remove the old key if nobody knows it any more.",
                ) from error
            with os.fdopen(opened, "w") as file:
                file.write(text + "\n")
        return secret, public


def read_key(path: Path) -> Key:
    """Read a key that signs."""
    kind, value, name = _read(path)
    if kind != "atoll-ed25519-secret":
        raise DeployError(
            f"A key that signs must be a file NAME.key. {path} holds another thing.",
            hint="`atoll keys NAME` makes one.",
        )
    return Key(name, value)


def read_public(path: Path) -> PublicKey:
    """Read what others may know of a key."""
    kind, value, name = _read(path)
    if kind != "atoll-ed25519":
        what = "the secret part, which must not leave its owner" if kind.endswith("secret") else "another thing"
        raise DeployError(f"A public key must be a file NAME.pub. {path} holds {what}.")
    return PublicKey(name, value)


def require_name(name: str) -> None:
    """Raise unless a name can be that of a site: letters, digits, points, dashes."""
    if not NAME.fullmatch(name):
        raise DeployError(
            f"A name must be 1 to 64 letters, digits, points, dashes and underscores. Got {name!r}.",
        )


def _read(path: Path) -> tuple[str, bytes, str]:
    words = read_regular(path, LARGEST).decode(errors="replace").split()
    try:
        kind, value, name = words[0], binascii.unhexlify(words[1]), words[2]
    except (IndexError, binascii.Error) as error:
        raise DeployError(f"{path} must be a key that `atoll keys` wrote. It is not.") from error
    if len(value) != 32 or not NAME.fullmatch(name):
        raise DeployError(f"{path} must be a key that `atoll keys` wrote. It is not.")
    return kind, value, name


def _library() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise DeployError(
            "Messages are signed with the package `cryptography`. It is not installed.",
            hint="pip install 'atoll[deploy]'",
        ) from error
    return ed25519, InvalidSignature
