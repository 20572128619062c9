"""gRPC health service with a bound on service names, because a watch keeps its name and needs no token."""

from typing import Any

from grpc_health.v1 import health, health_pb2

from pagoda_common.errors import InvalidRequest

MAX_NAME_CHARS = 256
"""Of a service."""


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health: Any
    """grpc.health.v1."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        """The status of a service; raises InvalidRequest for a name that is too long."""
        _check_name(request.service)
        return await super().Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Every status of a service; raises InvalidRequest for a name that is too long."""
        _check_name(request.service)
        await super().Watch(request, context)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        message = f"service has {len(name)} characters, at most {MAX_NAME_CHARS} are allowed"
        raise InvalidRequest(message, field="service")
