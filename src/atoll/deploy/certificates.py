"""Keys and certificates of a federation on a network: one command makes them all.

    keys/
      ca.crt  ca.key                 who signs the server's certificate; ca.key stays with the operator, off-line
      server/  ca.crt  server.crt  server.key  coordinator.key  coordinator.pub  sites/NAME.pub
      sites/NAME/  ca.crt  coordinator.pub  node.key  NAME.key  NAME.pub

The server gets its folder, each site its own. A site has two keys: node.key opens the connection (on an
elliptic curve), NAME.key signs what it sends (Ed25519). NAME.pub holds the public parts of both.
A site that does not want others to see its keys makes them itself and hands over NAME.pub, which the operator puts in
`server/sites/`.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.deploy.keys import Key, PublicKey, read_key, read_public, require_name
from atoll.kernel.errors import DeployError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Member:
    """A site that may take part: its name with the key of its signatures, and the key of its connection."""

    public: PublicKey
    node: bytes  # PEM


@dataclass(frozen=True)
class SiteKeys:
    """What a site has to show who it is, and to know the server."""

    key: Key
    node: ec.EllipticCurvePrivateKey
    coordinator: PublicKey | None
    authority: Path

    @classmethod
    def read(cls, folder: Path) -> SiteKeys:
        """Read the folder that a site was given."""
        found = [path for path in sorted(folder.glob("*.key")) if path.name != "node.key"]
        if len(found) != 1 or not (folder / "node.key").is_file():
            raise DeployError(
                f"A site must show who it is: its keys are node.key and NAME.key in one folder. {folder} has "
                f"{', '.join(path.name for path in sorted(folder.glob('*.key'))) or 'none'}.",
                hint="the operator of the server makes them with `atoll deploy keys`, or the site with --own NAME.",
            )
        known = folder / f"{COORDINATOR}.pub"
        coordinator = read_public(known) if known.exists() else None
        return cls(read_key(found[0]), _read_node_key(folder / "node.key"), coordinator, folder / "ca.crt")


@dataclass(frozen=True)
class ServerKeys:
    """What the server has: its certificate, the key that signs jobs, and who may take part."""

    key: Key
    certificate: tuple[Path, Path]
    members: dict[str, Member]

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """Read the server's folder."""
        certificate = folder / "server.crt", folder / "server.key"
        for path in (*certificate, folder / f"{COORDINATOR}.key"):
            if not path.is_file():
                raise DeployError(
                    f"The server must have its certificate and keys. There is no {path}.",
                    hint="make them with `atoll deploy keys --host NAME --site NAME`.",
                )
        return cls(read_key(folder / f"{COORDINATOR}.key"), certificate, read_members(folder / "sites"))


def make_keys(folder: Path, *, hosts: Sequence[str], sites: Sequence[str], days: int = 825) -> list[Path]:
    """Make a CA, the server's certificate for `hosts` and keys for each site; return what was written.

    What is there already stays: a second call adds sites, and makes a new server certificate for other hosts.
    """
    for name in sites:
        require_name(name)
    if len(set(sites)) < len(sites) or COORDINATOR in sites:
        raise DeployError(f"Each site must have a name of its own, not {COORDINATOR}. Got {', '.join(sites)}.")
    written: list[Path] = []
    authority, server = (folder / "ca.key", folder / "ca.crt"), folder / "server"
    if not authority[0].exists():
        written += _make_authority(*authority, days=days)
    if hosts:
        written += _make_server(server, hosts, authority, days=days)
    if not (server / f"{COORDINATOR}.key").exists():
        written += Key.make(COORDINATOR).save(server)
    for name in sites:
        mine = folder / "sites" / name
        if not (mine / "node.key").exists():
            written += make_site_keys(mine, name)
            written.append(_write(server / "sites" / f"{name}.pub", (mine / f"{name}.pub").read_bytes()))
            for shared in (authority[1], server / f"{COORDINATOR}.pub"):
                written.append(_write(mine / shared.name, shared.read_bytes()))
    return written


def make_site_keys(folder: Path, name: str) -> list[Path]:
    """Make the keys of one site in a folder of its own; NAME.pub is what it hands over."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    require_name(name)
    if (folder / "node.key").exists():
        raise DeployError(
            f"A site's key is its identity and must not be overwritten. {folder / 'node.key'} exists.",
            hint="use it, or remove it if the site shall be a new one to the server.",
        )
    secret, public = Key.make(name).save(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    node = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    _write(public, public.read_bytes() + node)
    return [secret, _write_private(folder / "node.key", key), public]


def read_members(folder: Path) -> dict[str, Member]:
    """Read the public keys of the sites that may take part, by name."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    found: dict[str, Member] = {}
    for path in sorted(folder.glob("*.pub")):
        public, text = read_public(path), path.read_bytes()
        if public.name != path.stem:
            raise DeployError(
                f"A site's public key must have the site's name. {path} is that of {public.name}.",
                hint=f"call the file {public.name}.pub, or have the site make keys with another name.",
            )
        try:
            key = serialization.load_pem_public_key(text[max(0, text.find(b"-----BEGIN")) :])
        except ValueError:
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise DeployError(
                f"A site's public key must be a file of `atoll deploy keys`, with both of its keys. {path} is not."
            )
        node = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        for name, other in found.items():
            if other.node == node or other.public.value == public.value:
                raise DeployError(
                    f"Each site must have a key of its own. {name} and {path.stem} have the same one.",
                    hint=f"have one of them make new keys, and replace {path}.",
                )
        found[path.stem] = Member(public, node)
    if not found:
        raise DeployError(
            f"The server must know the sites' public keys. There is no NAME.pub in {folder}.",
            hint="make them with `atoll deploy keys --site NAME`, or put those that sites sent you there.",
        )
    return found


def _read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError(f"A site's node.key must be a PEM file of `atoll deploy keys`. {path} is not.")
    return key


def _make_authority(key_file: Path, certificate_file: Path, *, days: int) -> list[Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    name = _name_of("Atoll federation")
    certificate = (
        _certificate(name, name, key.public_key(), key.public_key(), days=2 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return [_write_private(key_file, key), _write_certificate(certificate_file, certificate, key)]


def _make_server(folder: Path, hosts: Sequence[str], authority: tuple[Path, Path], *, days: int) -> list[Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer = serialization.load_pem_private_key(authority[0].read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority[1].read_bytes()).subject
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = (
        _certificate(_name_of(hosts[0]), issuer, key.public_key(), signer.public_key(), days=days)
        .add_extension(x509.SubjectAlternativeName([_address(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    return [
        _write_private(folder / "server.key", key),
        _write_certificate(folder / "server.crt", certificate, signer),
        _write(folder / "ca.crt", authority[1].read_bytes()),
    ]


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    *,
    days: int,
) -> x509.CertificateBuilder:
    from cryptography import x509

    begins = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _name_of(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _address(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    from cryptography.hazmat.primitives import serialization

    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _write(path, content, mode=0o600)


def _write_certificate(path: Path, builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey) -> Path:
    from cryptography.hazmat.primitives import hashes, serialization

    return _write(path, builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=mode)
    path.write_bytes(content)
    return path
