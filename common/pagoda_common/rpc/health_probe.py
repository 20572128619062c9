"""``pagoda-health HOST:PORT``: the grpc.health.v1 answer of a service, for health checks of containers.

It runs every few seconds beside its service, so it imports grpc and nothing else of size: the two messages are spelled
out by hand. The files of TLS are found where the service finds them, in PAGODA_TLS_CA and its like.
"""

import argparse
import os
import sys
from pathlib import Path

import grpc

CHECK = "/grpc.health.v1.Health/Check"
STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""HealthCheckResponse.ServingStatus, by number."""
DEFAULT_TIMEOUT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the service to check."""
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of a frontend, scheduler or worker")
    parser.add_argument(
        "--service", default="", help="full name, such as pagoda.v1.Scheduler; the whole server if not given"
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="time limit (default: %(default)s)"
    )
    for name, text in (
        ("tls-ca", "certificate authorities (PEM) of the service; turns TLS on"),
        ("tls-cert", "certificate (PEM) of this client"),
        ("tls-key", "private key (PEM) of --tls-cert"),
    ):
        default = os.environ.get(f"PAGODA_{name.replace('-', '_').upper()}") or None
        parser.add_argument(f"--{name}", metavar="FILE", default=default, help=text)
    # Not from PAGODA_TLS_SERVER_NAME: that names whom the service itself calls.
    parser.add_argument(
        "--tls-server-name", metavar="NAME", help="name expected in the service's certificate; the host if not given"
    )


def run(args: argparse.Namespace) -> int:
    """Print the status; 0 for SERVING, 1 for every other one and for no answer (the reason is on stderr)."""
    try:
        credentials = _credentials(args.tls_ca, args.tls_cert, args.tls_key)
        status = check(
            args.address,
            service=args.service,
            timeout_s=args.timeout,
            credentials=credentials,
            server_name=args.tls_server_name,
        )
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        print(reason, file=sys.stderr)
        return 1
    print(status)
    return 0 if status == "SERVING" else 1


def check(
    address: str,
    *,
    service: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
) -> str:
    """The status of `service` at `address`, one of STATUSES; without `credentials` it is asked in plaintext.

    `server_name` is looked for in the certificate instead of the address's host.

    Raises:
        grpc.RpcError: no one answers within `timeout_s`, or the server does not know the service.
    """
    name = service.encode()
    # One string field, number 1: tag, length as a varint, bytes.
    request = b"\x0a" + _varint(len(name)) + name if name else b""
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    open_channel = grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address)
    with open_channel as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK)
        response = call(request, timeout=timeout_s)
    # One enum field, number 1: tag, value; absent for UNKNOWN.
    number = response[1] if response[:1] == b"\x08" else 0
    return STATUSES[number] if number < len(STATUSES) else STATUSES[0]


def _credentials(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials | None:
    if ca is None:
        return None
    chain, private = (Path(file).read_bytes() if file else None for file in (cert, key))
    return grpc.ssl_channel_credentials(Path(ca).read_bytes(), private, chain)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def main() -> int:
    """Entry point of ``pagoda-health``."""
    parser = argparse.ArgumentParser(prog="pagoda-health", description="Ask a service of Pagoda for its health.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
