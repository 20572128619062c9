"""BoundedCompiler: compiles constraints so that a bad one cannot end the process (a worker or a user's program).

What is small compiles in bounded time and stack, by llguidance's own limits; what is large is tried in a process of its
own first. The frontend tries everything (its grammar_checks), for there anybody asks. No gRPC, no asyncio.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from subprocess import DEVNULL, PIPE

from llguidance import LLMatcher

from pagoda_common.errors import InvalidRequest, NotReady
from pagoda_common.grammar.matcher import GrammarCompiler, forced_fault
from pagoda_common.params.structured_outputs import StructuredOutputsParams

SMALL_BYTES = 16 * 1024
"""A constraint up to this size is compiled at once: no such one took more than two seconds or a deep stack."""
START_S = 60.0
COMPILE_S = 5.0
TOO_COMPLEX = "structured_outputs is too complex to be compiled"


class BoundedCompiler:
    """A GrammarCompiler that refuses what would take too much."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        tokenizer: str,
        revision: str | None,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`tokenizer`: directory or hub id of what `compiler` was made for, for the process to load again."""
        self.compiler = compiler
        ends = ",".join(map(str, eos_token_ids))
        self._command = [sys.executable, "-m", "pagoda_common.grammar.grammar_process"]
        self._command += [tokenizer, revision or "", str(vocab_size), ends]

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an output.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or not within bounds on time, memory and stack.
        """
        if constraint_bytes(params) > SMALL_BYTES:
            error = self._try_apart(params)
            if error is not None:
                raise InvalidRequest(error, field="structured_outputs")
        matcher = self.compiler.compile(params)
        if (fault := forced_fault(matcher.deep_copy())) is not None:
            raise InvalidRequest(fault, field="structured_outputs")
        return matcher

    def _try_apart(self, params: StructuredOutputsParams) -> str | None:
        """The fault of `params`, found by a process that it may crash."""
        line = json.dumps({"params": {**asdict(params), "start_after_token_ids": ()}}).encode() + b"\n"
        with subprocess.Popen(
            self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True, bufsize=0
        ) as process:
            try:
                if not _read_line(process, START_S):
                    raise NotReady("a large constraint needs a process to be tried in, which does not start")
                assert process.stdin is not None
                process.stdin.write(line)
                answer = _read_line(process, COMPILE_S)
                error: str | None = json.loads(answer)["error"] if answer else TOO_COMPLEX
                return error
            except OSError:
                return TOO_COMPLEX  # it broke before it had read all
            finally:
                process.kill()


def constraint_bytes(params: StructuredOutputsParams) -> int:
    """The size of the constraint to compile."""
    value = getattr(params, params.kind)
    if isinstance(value, str):
        return len(value.encode())
    return sum(len(text.encode()) for text in value) if isinstance(value, tuple) else 0


def _read_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """The next line; empty when the process ends, or there is none in time."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            return b""
        piece = process.stdout.read(65536)
        if not piece:
            return b""
        line += piece
    return line
