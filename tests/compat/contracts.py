"""The contracts of the previous version as message classes and calls, in a descriptor pool of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PREVIOUS = Path(__file__).parent / "v0.1.0.binpb"
PACKAGE = "pagoda.v1"


class Contracts:
    """Messages by name (``contracts.SubmitRequest(...)``), and both sides of the services, as a peer has them that was
    generated from the previous .proto files: what it does not know of, it does not see."""

    def __init__(self, path: Path = PREVIOUS) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
            self._pool.Add(file)

    def __getattr__(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def stub(self, channel: grpc.aio.Channel, service: str, method: str) -> Any:
        """A call of `channel`."""
        found = self._pool.FindServiceByName(f"{PACKAGE}.{service}").methods_by_name[method]
        answer = message_factory.GetMessageClass(found.output_type)
        make = getattr(channel, _kind(found))
        return make(
            f"/{PACKAGE}.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )

    def handlers(self, service: str, behaviours: dict[str, Callable[..., Any]]) -> grpc.GenericRpcHandler:
        """`service` with the methods in `behaviours`; the others are unimplemented."""
        methods = self._pool.FindServiceByName(f"{PACKAGE}.{service}").methods_by_name
        handlers = {}
        for name, behaviour in behaviours.items():
            asked = message_factory.GetMessageClass(methods[name].input_type)
            make = getattr(grpc, f"{_kind(methods[name])}_rpc_method_handler")
            handlers[name] = make(
                behaviour,
                request_deserializer=asked.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
        return grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)


def _kind(method: Any) -> str:
    sides = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if is_stream else "unary" for is_stream in sides)
