"""Certificates and keys for a test fleet: python make_keys.py DIR --host NAME ... --nodes 5.

Writes an authority (ca.key, ca.crt), the SuperLink's certificate (server.key, server.crt) and a key pair per node
(node-0.key, node-0.pub; OpenSSH format, as Flower reads them). Private keys that are there already are kept, and what
is public is made anew from them: the same command adds nodes, adds names of the SuperLink, and renews
certificates, which are valid for a year. A fleet that matters has an authority of its own, away from its machines.
"""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365


def write_secret(path: Path, data: bytes) -> None:
    """Readable for its owner alone, from the first moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def name(text: str) -> x509.Name:
    """A name of a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def certificate(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """What all certificates here have in common."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def private_key(path: Path, format: PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """The key in a file: the one that is there, or a new one."""
    if path.exists():
        load = load_ssh_private_key if format == PrivateFormat.OpenSSH else load_pem_private_key
        known = load(path.read_bytes(), None)
        assert isinstance(known, ec.EllipticCurvePrivateKey)
        return known
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(path, key.private_bytes(Encoding.PEM, format, NoEncryption()))
    return key


def make_authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    """The authority that signs the SuperLink's certificate."""
    key = private_key(folder / "ca.key", PrivateFormat.PKCS8)
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    signed = (
        certificate("test fleet", "test fleet", key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(signed.public_bytes(Encoding.PEM))
    return key


def make_server(folder: Path, authority: ec.EllipticCurvePrivateKey, hosts: list[str]) -> None:
    """The SuperLink's certificate, for all names and addresses under which it is reached."""
    key = private_key(folder / "server.key", PrivateFormat.PKCS8)
    signer = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    named = [alternative(host) for host in (*hosts, "localhost", "127.0.0.1")]
    if (folder / "server.crt").exists():  # what it was called before, too
        before = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
        named += before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names = x509.SubjectAlternativeName(dict.fromkeys(named))
    signed = (
        certificate("superlink", "test fleet", key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
        .sign(authority, hashes.SHA256())
    )
    (folder / "server.crt").write_bytes(signed.public_bytes(Encoding.PEM))


def alternative(host: str) -> x509.GeneralName:
    """An address, or else a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_node(folder: Path, node: str) -> None:
    """A node's key pair."""
    key = private_key(folder / f"{node}.key", PrivateFormat.OpenSSH)
    (folder / f"{node}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("--host", action="append", default=[], help="name or address of the SuperLink; repeatable")
    parser.add_argument("--nodes", type=int, default=5, help="key pairs, node-0 and so on")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_server(given.folder, make_authority(given.folder), given.host)
    for number in range(given.nodes):
        make_node(given.folder, f"node-{number}")
    print(f"certificates and {given.nodes} node keys in {given.folder}")


if __name__ == "__main__":
    main()
