"""The scripts of the deployment, as far as they start nothing."""

import os
import subprocess
import sys
from pathlib import Path

from cryptography import x509

SCRIPTS = Path(__file__).parents[2] / "examples" / "flower-deployment"


def make_keys(folder: Path, *options: str) -> dict[str, bytes]:
    subprocess.run([sys.executable, str(SCRIPTS / "make_keys.py"), str(folder), *options], check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_keys_stay_and_certificates_follow_the_hosts(tmp_path: Path) -> None:
    first = make_keys(tmp_path / "keys", "--nodes", "1")
    (tmp_path / "keys" / "node-0.pub").unlink()  # as if the first call had been interrupted
    second = make_keys(tmp_path / "keys", "--nodes", "2", "--host", "fleet.example.org", "--host", "10.0.0.7")
    assert set(second) - set(first) == {"node-1.key", "node-1.pub"}
    for name in first:
        assert (first[name] == second[name]) == (not name.endswith(".crt")), name
    for name in (name for name in second if name.endswith(".key")):
        assert (tmp_path / "keys" / name).stat().st_mode & 0o777 == 0o600
    authority, server = (x509.load_pem_x509_certificate(second[name]) for name in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(authority)
    server.verify_directly_issued_by(x509.load_pem_x509_certificate(first["ca.crt"]))  # which nodes may still have
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fleet.example.org", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.7", "127.0.0.1"}
    third = make_keys(tmp_path / "keys", "--nodes", "3")  # as one adds a node: the SuperLink keeps its names
    server = x509.load_pem_x509_certificate(third["server.crt"])
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fleet.example.org", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.7", "127.0.0.1"}


def test_the_connection_is_that_of_the_last_call(tmp_path: Path) -> None:
    config = tmp_path / "flwr" / "config.toml"
    config.parent.mkdir()
    config.write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.fleet]\naddress = "old"\n\n[superlink.local]\nx = 1\n'
    )
    for host in ("first.example.org", "second.example.org"):
        environment = os.environ | {"HOST": host, "KEYS": "/k", "FLWR_HOME": str(config.parent)}
        subprocess.run([str(SCRIPTS / "register.sh")], env=environment, check=True)
    assert config.read_text() == (
        '[superlink]\ndefault = "local"\n\n[superlink.local]\nx = 1\n'
        '[superlink.fleet]\naddress = "second.example.org:8000"\nroot-certificates = "/k/ca.crt"\n'
    )
