"""Keys and certificates of a federation on a network: one command makes them all.

    keys/
      ca.crt  ca.key                 who signs the server's certificate; ca.key stays with the operator, off-line
      server/  ca.crt  server.crt  server.key  sites/NAME.pub
      sites/NAME/  ca.crt  node.key

The server gets its folder, each site its own. A site that does not want others to see its private key makes it itself
and hands over the public one, which the operator puts in `server/sites/`: the name of that file is the site's name.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.kernel.errors import RunError, UnknownName

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def make_keys(folder: Path, *, hosts: Sequence[str], sites: Sequence[str], days: int = 825) -> list[Path]:
    """Make a CA, the server's certificate for `hosts` and a key for each site; return what was written.

    What is there already stays: a second call adds sites, and makes a new server certificate for other hosts.
    """
    for name in sites:
        require_name(name)
    if len(set(sites)) < len(sites):
        raise UnknownName(f"Each site must have a name of its own. Got {', '.join(sites)}.")
    written: list[Path] = []
    authority = folder / "ca.key", folder / "ca.crt"
    if not authority[0].exists():
        written += _make_authority(*authority, days=days)
    if hosts:
        written += _make_server(folder / "server", hosts, authority, days=days)
    for name in sites:
        if not (folder / "sites" / name / "node.key").exists():
            written += make_site_key(folder / "sites" / name, name, folder / "server" / "sites")
            written.append(_write(folder / "sites" / name / "ca.crt", authority[1].read_bytes()))
    return written


def make_site_key(folder: Path, name: str, public: Path) -> list[Path]:
    """Make the key of one site: the private part in `folder`, the public part as `public`/NAME.pub."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    require_name(name)
    if (folder / "node.key").exists():
        raise RunError(
            f"A site's key is its identity and must not be overwritten. {folder / 'node.key'} exists.",
            hint="use it, or remove it if the site shall be a new one to the server.",
        )
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    mine = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    return [_write_private(folder / "node.key", key), _write(public / f"{name}.pub", mine)]


def require_name(name: str) -> None:
    """Raise unless this can be a site's name: it becomes a file's."""
    if not NAME.fullmatch(name):
        raise UnknownName(
            f"A site's name must be letters, digits, dots, dashes and underscores, at most 64. Got {name!r}."
        )


def read_sites(folder: Path) -> dict[str, bytes]:
    """Read the public keys of the sites that may take part, by name."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        require_name(path.stem)
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except ValueError:
            raise RunError(f"A site's public key must be a PEM file of `atoll deploy keys`. Got {path}.") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise RunError(f"A site's public key must be one of an elliptic curve. Got {path}.")
        content = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        same = [name for name, other in found.items() if other == content]
        if same:
            raise RunError(
                f"Each site must have a key of its own. {same[0]} and {path.stem} have the same one.",
                hint=f"make a new key for one of them and replace {path}.",
            )
        found[path.stem] = content
    if not found:
        raise RunError(
            f"The server must know the sites' public keys. There is no NAME.pub in {folder}.",
            hint="make them with `atoll deploy keys --site NAME`, or put those that sites sent you there.",
        )
    return found


def read_site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the private key of a site."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.is_file():
        raise RunError(
            f"A site must show who it is with its key. There is no {path}.",
            hint="the operator of the server makes it with `atoll deploy keys`.",
        )
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        raise RunError(f"A site's key must be a PEM file of `atoll deploy keys`. Got {path}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(f"A site's key must be one of an elliptic curve. Got {path}.")
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
