"""A Redis and a PostgreSQL that speak TLS alone and want a password, with a certificate made for the test."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import redis

from tests.conftest import missing_service
from tests.faults.servers import PrivatePostgres, free_port, wait_until

PASSWORD = "s3cr:t@/x%hunter2"  # with every character that a URL must escape


def make_certificate(folder: Path, name: str = "localhost") -> Path:
    """A certificate that signed itself, and `key.pem` beside it; returns the certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=DNS:{name}", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem"


@contextmanager
def tls_redis(certificate: Path) -> Iterator[str]:
    """The URL, with its password, of a server that does not speak without TLS."""
    if (program := shutil.which("redis-server") or shutil.which("valkey-server")) is None:
        missing_service("redis-server with TLS")
    port = free_port()
    options = {
        "--port": "0",
        "--tls-port": str(port),
        "--tls-cert-file": str(certificate),
        "--tls-key-file": str(certificate.parent / "key.pem"),
        "--tls-ca-cert-file": str(certificate),
        "--tls-auth-clients": "no",
        "--requirepass": PASSWORD,
        "--save": "",
    }
    command = [program, *(part for option in options.items() for part in option)]
    with subprocess.Popen(command, cwd=certificate.parent, stdout=subprocess.DEVNULL) as process:
        url = f"rediss://:{quote(PASSWORD, safe='')}@localhost:{port}/0?ssl_ca_certs={certificate}"
        try:
            with redis.Redis.from_url(url) as client:
                wait_until(lambda: answers(client))
            yield url
        finally:
            process.terminate()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class TlsPostgres(PrivatePostgres):
    """Takes TLS connections with a password alone, but for the superuser's, which set it up."""

    def __init__(self, certificate: Path) -> None:
        super().__init__()
        self.certificate = certificate

    def start(self) -> None:
        data = self.folder / "data"
        for name in ("cert.pem", "key.pem"):
            shutil.copy(self.certificate.parent / name, data / name)
            shutil.chown(data / name, data.owner())
            (data / name).chmod(0o600)
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write("ssl = on\nssl_cert_file = 'cert.pem'\nssl_key_file = 'key.pem'\nlog_statement = all\n")
        access = ["host all postgres 127.0.0.1/32 trust", "hostssl all laya localhost scram-sha-256"]
        (data / "pg_hba.conf").write_text("\n".join(access) + "\n")
        super().start()
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE laya LOGIN PASSWORD '{PASSWORD}'")
            connection.execute("CREATE DATABASE laya OWNER laya")
        address = f"postgresql://laya:{quote(PASSWORD, safe='')}@localhost:{self.port}/laya"
        self.url = f"{address}?sslmode=verify-full&sslrootcert={self.certificate}"
