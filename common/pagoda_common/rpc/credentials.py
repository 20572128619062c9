"""Certificates and tokens of gRPC connections: new connections use the files' current content."""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pagoda_common.config.security_config import TOKEN_VARIABLE, SecurityConfig, ServerSecurity
from pagoda_common.errors import Code, ConfigError, PagodaError
from pagoda_common.process.watched_files import WatchedFiles
from pagoda_common.rpc.bearer import BearerKeys, read_keys

MIN_TOKEN_CHARS = 16
HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Probes hold no token; what they learn is whether the service serves."""


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of the files of one identity."""

    chain: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


def pem_files(*, cert: str | None, key: str | None, ca: str | None) -> WatchedFiles[Pem]:
    """Watched PEM files: certificate chain, private key, authorities.

    Raises:
        ConfigError: a file cannot be read, is no PEM, or the key is not the certificate's.
    """
    return WatchedFiles((cert, key, ca), lambda: _read_pem(cert, key, ca))


def _read_pem(cert: str | None, key: str | None, ca: str | None) -> Pem:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    path = ca
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        path = cert
        if cert is not None:
            context.load_cert_chain(cert, key, password=b"")  # an encrypted key is refused, not asked for at a terminal
        return Pem(*(None if file is None else Path(file).read_bytes() for file in (cert, key, ca)))
    except OSError as error:  # ssl.SSLError is one
        what = f"tls_ca {ca!r}" if path == ca else f"tls_cert {cert!r} with tls_key {key!r}"
        reason = error.strerror if error.filename is None and error.strerror else str(error)
        raise ConfigError(f"{what} cannot be used: {reason}", field="tls_cert") from error


def server_credentials(security: ServerSecurity) -> grpc.ServerCredentials | None:
    """Credentials of a port; None is plaintext. Every handshake uses the certificate that the files then contain.

    Raises:
        ConfigError: a file cannot be used.
    """
    if security.cert_file is None:
        return None
    files = pem_files(cert=security.cert_file, key=security.key_file, ca=security.client_ca_file)
    shown = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        pem = files.current()
        if pem is shown:
            return None
        shown = pem
        return _certificate_configuration(pem)

    first = _certificate_configuration(shown)
    asks_clients = security.client_ca_file is not None
    # The stubs do not know that None means no change.
    return grpc.dynamic_ssl_server_credentials(first, fetch, asks_clients)  # type: ignore[arg-type]  # as said above


def _certificate_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.chain is not None, "a server has a certificate"
    assert pem.key is not None, "with its key"
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.ca)


def _read_tokens(file: str | None, token: str) -> tuple[str, ...]:
    """The services' tokens: those in `file`, or else `token`, or else none.

    Raises:
        ConfigError: the file cannot be read, or a token is too short or has characters that no header holds.
    """
    where = f"service_token_file {file!r}" if file is not None else TOKEN_VARIABLE
    tokens = read_keys(file, field="service_token_file") if file is not None else tuple(token.split())
    for one in tokens:
        if len(one) < MIN_TOKEN_CHARS:
            message = f"{where} has a token of {len(one)} characters, must be at least {MIN_TOKEN_CHARS}"
            raise ConfigError(message, field="service_token_file")
        if not (one.isascii() and one.isprintable()):
            raise ConfigError(f"{where} has a token with characters beyond printable ASCII", field="service_token_file")
    return tokens


class RequireBearer(grpc.aio.ServerInterceptor):
    """Refuses calls that show none of some keys: UNAUTHENTICATED."""

    def __init__(self, keys: Callable[[], BearerKeys], *, open_prefixes: tuple[str, ...], message: str) -> None:
        """
        Args:
            keys: those of now.
            open_prefixes: beginnings of full method names (/package.Service/) that need none of them.
            message: of the refusal.
        """
        self._keys = keys
        self._open_prefixes = open_prefixes
        self._message = message

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or the one that refuses it."""
        is_open = handler_call_details.method.startswith(self._open_prefixes)
        if not is_open and self._keys().accepted(handler_call_details.invocation_metadata) is None:
            return grpc.stream_unary_rpc_method_handler(self._refuse)  # before its message, if there is one, has come
        return await continuation(handler_call_details)

    async def _refuse(self, requests: Any, context: Any) -> Any:
        raise PagodaError(self._message, code=Code.UNAUTHENTICATED)


def token_guard(security: ServerSecurity) -> RequireBearer | None:
    """The interceptor that `security` asks for. Health stays open, reflection does not.

    Raises:
        ConfigError: the tokens cannot be used.
    """
    file, token = security.service_token_file, security.service_token
    if file is None and not token:
        return None
    message = f"the call has no valid service token: give both sides --service-token-file or {TOKEN_VARIABLE}"
    keys = WatchedFiles((file,), lambda: BearerKeys(_read_tokens(file, token)))
    return RequireBearer(keys.current, open_prefixes=(HEALTH_PREFIX,), message=message)


class ClientCredentials:
    """Credentials for the services that this process calls, and what they must show."""

    def __init__(self, config: SecurityConfig) -> None:
        """Raises ConfigError when a file cannot be used."""
        self.config = config
        self._pem = pem_files(cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca)
        file, token = config.service_token_file, config.service_token
        self._tokens = WatchedFiles((file,), lambda: _read_tokens(file, token))

    def pem(self) -> Pem:
        """Certificates as they are in the files; the same object as long as these have not changed."""
        return self._pem.current()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        tokens = self._tokens.current()
        return (("authorization", f"Bearer {tokens[0]}"),) if tokens else ()
