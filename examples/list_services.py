"""List what a gRPC port serves, by server reflection, and the health of each service.

    python examples/list_services.py [127.0.0.1:50051]

No .proto file is needed. grpcurl and grpcui work in the same way.
"""

import sys
from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TIMEOUT_S = 5.0


def lines(address: str) -> Iterator[str]:
    """One line a service, with an indented one for each of its methods.

    Raises:
        grpc.RpcError: no one answers there, or reflection needs a service token.
    """
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        health = health_pb2_grpc.HealthStub(channel)
        for name in sorted(database.get_services()):
            yield f"{name}{_health(health, name)}"
            for method in pool.FindServiceByName(name).methods:
                yield f"  {signature(method)}"


def signature(method: MethodDescriptor) -> str:
    """A method as a .proto file writes it."""
    takes = ("stream " if method.client_streaming else "") + method.input_type.name
    gives = ("stream " if method.server_streaming else "") + method.output_type.name
    return f"{method.name}({takes}) returns ({gives})"


def _health(stub: health_pb2_grpc.HealthStub, name: str) -> str:
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return ""  # it has no health of its own
        raise
    return f": {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def main() -> None:
    """Print the list."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    try:
        for line in lines(address):
            print(line)
    except (grpc.RpcError, grpc.FutureTimeoutError) as error:
        sys.exit(f"{address}: {error.details() if isinstance(error, grpc.Call) else 'no answer'}")


if __name__ == "__main__":
    main()
