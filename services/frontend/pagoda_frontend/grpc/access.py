"""Access over gRPC: keys and tenants."""

from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.rpc.credentials import HEALTH_PREFIX, RequireBearer

REFLECTION_PREFIX = "/grpc.reflection."
"""Tells the contracts, which are public."""


def require_api_key_rpc(keys: BearerKeys) -> RequireBearer:
    """Refuses gRPC calls without one of the keys: UNAUTHENTICATED. Health and reflection stay open."""
    message = "the call shows none of the API keys: metadata `authorization: Bearer KEY` is expected"
    return RequireBearer(lambda: keys, open_prefixes=(HEALTH_PREFIX, REFLECTION_PREFIX), message=message)
