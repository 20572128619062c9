"""Access over gRPC: keys and tenants."""

from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.rpc.credentials import HEALTH_PREFIX, RequireBearer

REFLECTION_PREFIX = "/grpc.reflection."
"""Serves the contracts, which are public."""


def require_api_key_rpc(keys: BearerKeys) -> RequireBearer:
    """Refuses gRPC calls without one of the keys: UNAUTHENTICATED. Health and reflection stay open."""
    message = "the call has no valid API key: send metadata `authorization: Bearer KEY`"
    return RequireBearer(lambda: keys, open_prefixes=(HEALTH_PREFIX, REFLECTION_PREFIX), message=message)
