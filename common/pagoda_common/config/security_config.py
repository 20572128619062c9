"""SecurityConfig: how services trust each other, and which connections may be unencrypted. Reads no files
(credentials.py does)."""

import ipaddress
from dataclasses import dataclass, field

from pagoda_common.errors import ConfigError
from pagoda_common.rpc.local_socket import is_local_socket

TOKEN_VARIABLE = "PAGODA_SERVICE_TOKEN"
"""Environment variable of the services' token; --service-token-file goes before it."""
UNGUARDED = f"every user of this machine may call: no --service-token-file, {TOKEN_VARIABLE} or --tls-ca is given"
PLAINTEXT_ADVICE = "give --tls-cert, --tls-key and --tls-ca, or --insecure where the network itself is trusted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSecurity:
    """Credentials of one gRPC port, and what callers must show. Empty: plaintext, on loopback only."""

    cert_file: str | None = None
    """PEM file of the certificate chain; None is plaintext."""
    key_file: str | None = None
    """PEM file of its private key."""
    client_ca_file: str | None = None
    """PEM file of the authorities that may sign clients' certificates; None requires no certificate."""
    service_token_file: str | None = None
    """File of tokens, one per line; a caller must send one of them."""
    service_token: str = field(default="", repr=False)
    """The token itself, where there is no file; empty asks for none."""
    insecure: bool = False
    """Plaintext is allowed on any interface."""
    advice: str = PLAINTEXT_ADVICE
    """Ends the refusal of plaintext."""

    def check_listen(self, host: str) -> None:
        """Raises ConfigError when this port would be plaintext on an interface that others reach."""
        if self.cert_file is None and not self.insecure and not is_loopback(host):
            message = f"host is {host!r}, must be loopback for gRPC without TLS: {self.advice}"
            raise ConfigError(message, field="host")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecurityConfig:
    """One identity for a service, as server and as client of the others."""

    tls_cert: str | None = None
    """PEM file of this service's certificate chain, shown to servers and clients alike."""
    tls_key: str | None = None
    """PEM file of its private key."""
    tls_ca: str | None = None
    """PEM file of the authorities whose certificates peers must show; with it every connection is TLS."""
    tls_server_name: str | None = None
    """Name that must stand in a server's certificate; None takes the host that is dialled."""
    service_token_file: str | None = None
    """File of tokens, one a line: every one opens this service, the first is shown to others."""
    service_token: str = field(default="", repr=False)
    """The token itself, where there is no file. From the environment: a command line is no place for it."""
    insecure: bool = False
    """Plaintext is allowed with peers that are not on loopback."""

    def __post_init__(self) -> None:
        pair = (self.tls_cert is None, self.tls_key is None)
        if any(pair) and not all(pair):
            given, missing = ("tls_cert", "tls_key") if pair[1] else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is {getattr(self, given)!r}, must be given with {missing}", field=given)
        for name in ("tls_cert", "tls_server_name"):
            if getattr(self, name) is not None and self.tls_ca is None:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be given with tls_ca", field=name)

    @property
    def is_guarded(self) -> bool:
        """Whether callers must show a token or a certificate."""
        return bool(self.service_token) or self.service_token_file is not None or self.tls_ca is not None

    @property
    def server(self) -> ServerSecurity:
        """Security of the ports that only other services call: mutual TLS, a token, both or neither.

        Raises:
            ConfigError: clients should be checked, and the server has no certificate.
        """
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigError(f"tls_ca is {self.tls_ca!r}, must be given with tls_cert on a server", field="tls_ca")
        return ServerSecurity(
            cert_file=self.tls_cert,
            key_file=self.tls_key,
            client_ca_file=self.tls_ca,
            service_token_file=self.service_token_file,
            service_token=self.service_token,
            insecure=self.insecure,
        )

    def check_dial(self, address: str, *, name: str) -> None:
        """Raises ConfigError when `address` (of field `name`) would be called in plaintext over a net.

        What stays on this machine may be: host:port on loopback, and an abstract socket.
        """
        if self.tls_ca is None and not self.insecure and not is_local(address):
            message = f"{name} is {address!r}, must be on loopback without TLS: {PLAINTEXT_ADVICE}"
            raise ConfigError(message, field=name)


def host_of(address: str) -> str:
    """The host of ``host:port``, without the brackets of IPv6."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_local(address: str) -> bool:
    """Whether only this machine reaches `address`, which is host:port or an abstract socket's."""
    return is_local_socket(address) or is_loopback(host_of(address))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may lead anywhere tomorrow."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
