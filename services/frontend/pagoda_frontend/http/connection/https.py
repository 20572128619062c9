"""Reloads changed HTTPS certificate files. Open connections keep the certificate that they were shown."""

import asyncio
import contextlib
import ssl

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.rpc.credentials import pem_files

POLL_S = 1.0


async def follow_certificate(context: ssl.SSLContext, config: FrontendConfig) -> None:
    """Load changed certificates into `context`, which the server uses for every new connection.

    Runs until cancelled. A key that does not fit its certificate (between two writes of the files) is ignored, with a
    warning.
    """
    assert config.ssl_certfile is not None, "HTTPS has a certificate"
    key_file = config.ssl_keyfile or config.ssl_certfile
    files = pem_files(cert=config.ssl_certfile, key=key_file, ca=config.ssl_ca_certs)
    loaded = files.current()
    while True:
        await asyncio.sleep(POLL_S)
        pem = files.current()
        if pem is not loaded:
            with contextlib.suppress(OSError):  # they change again at this moment: the next look will do
                context.load_cert_chain(config.ssl_certfile, key_file)
                if config.ssl_ca_certs is not None:
                    context.load_verify_locations(config.ssl_ca_certs)
                loaded = pem
