"""``pagoda health ADDRESS``: the grpc.health.v1 answer of any service, for scripts and containers."""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask."""
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of a frontend, scheduler or worker")
    parser.add_argument("--service", default="", help="full name, such as pagoda.v1.Scheduler; the server as a whole")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="(default: %(default)s)")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the status; 0 for SERVING, 1 for everything else."""
    request = health_pb2.HealthCheckRequest(service=args.service)
    with grpc.insecure_channel(args.address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=args.timeout)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
            print(reason, file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    print(status)
    return 0 if status == "SERVING" else 1
