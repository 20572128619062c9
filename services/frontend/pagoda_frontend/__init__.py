"""The frontend: OpenAI HTTP and public gRPC in, token ids to the scheduler, text back. Knows no tensors, no blocks."""

import os

# The frontend starts the process that compiles constraints. gRPC's own handlers of fork(), which it registers when it
# is imported, now and then crash the child before it becomes that process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
