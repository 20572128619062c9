"""``pagoda health ADDRESS``: the grpc.health.v1 answer of any service, for scripts."""

import argparse

from pagoda_common.rpc import health_probe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask."""
    health_probe.add_arguments(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the status; 0 for SERVING, 1 for everything else."""
    return health_probe.run(args)
