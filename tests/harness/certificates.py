"""Certificates for tests, made by the script that users are given."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagoda_common.config.security_config import SecurityConfig

SCRIPT = Path(__file__).parents[2] / "examples" / "tls" / "make_certs.sh"


@dataclass(frozen=True)
class Certificates:
    """A directory with an authority and what it has signed."""

    directory: Path

    def make(self, *names: str) -> None:
        """Make pairs for the names, or make them again."""
        command = ["sh", str(SCRIPT), str(self.directory), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr

    def path(self, file: str) -> str:
        """Of a file in the directory."""
        return str(self.directory / file)

    def config(self, name: str, *, server_name: str | None = None) -> SecurityConfig:
        """For the service called `name`."""
        return SecurityConfig(
            tls_cert=self.path(f"{name}.crt"),
            tls_key=self.path(f"{name}.key"),
            tls_ca=self.path("ca.crt"),
            tls_server_name=server_name,
        )


def make_certificates(directory: Path, *names: str) -> Certificates:
    """An authority in `directory`, and pairs for the names. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    certificates = Certificates(directory)
    certificates.make(*names)
    return certificates
