"""A process that compiles constraints for its parent, because a bad one may take much time, memory or stack.

Reads one JSON object a line ({"params": …}, fields of StructuredOutputsParams), answers one a line ({"error": text or
null}). Ends when its input does.
"""

import json
import sys
import threading

import numpy as np
from llguidance import LLExecutor, LLMatcher

from pagoda_common.errors import PagodaError
from pagoda_common.grammar.matcher import GrammarCompiler, forced_fault
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.process.job_limits import limit_cpu, limit_memory
from pagoda_common.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 1 << 30
"""On top of what the process has when it is ready."""
MAX_CPU_S = 1.0
"""CPU seconds for one constraint. The worker compiles it again."""
STACK_BYTES = 4 << 20
"""Half of what a thread of a worker has: what is compiled here is compiled there."""
NUM_TRIED_TOKENS = 4
"""Masks that are computed: some faults of a grammar show when it is used."""


class Checker:
    """Compiles one constraint after the other, each on a thread with a small stack."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = LLExecutor(1)

    def error_of(self, params: StructuredOutputsParams) -> str | None:
        """The fault of `params`; None if an output can match it."""
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(self._try(params)))
        thread.start()
        thread.join()
        return found[0] if found else "structured_outputs cannot be compiled"

    def _try(self, params: StructuredOutputsParams) -> str | None:
        try:
            matcher = self._compiler.compile(params)
            return self._walk(matcher, params)
        except PagodaError as error:
            return error.message
        except MemoryError:
            return "structured_outputs takes too much memory"

    def _walk(self, matcher: LLMatcher, params: StructuredOutputsParams) -> str | None:
        bits = np.zeros((1, -(-self._compiler.num_bits // 32)), dtype=np.uint32)
        for number in range(NUM_TRIED_TOKENS):
            if (fault := forced_fault(matcher)) is not None:
                return fault
            bits[:] = 0
            self._executor.unsafe_compute_mask_ptr([(matcher, 0)], bits.ctypes.data, bits.nbytes, 1)
            if matcher.is_error():
                return f"structured_outputs.{params.kind}: {matcher.get_error().strip()}"[:500]
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8)[0], bitorder="little"))
            if number == 0 and not allowed.size:
                return f"structured_outputs.{params.kind}: no text matches"
            allowed = allowed[allowed < self._compiler.end_id]
            if not allowed.size or not matcher.consume_token(int(allowed[number * allowed.size // NUM_TRIED_TOKENS])):
                return None
        return None


def main() -> None:
    """`argv`: tokenizer, revision ("" for none), vocabulary size, end tokens with commas between them."""
    tokenizer, revision, vocab_size, eos_token_ids = sys.argv[1:]
    compiler = GrammarCompiler(
        tokenizer=Tokenizer.load(tokenizer, revision=revision or None),
        vocab_size=int(vocab_size),
        eos_token_ids=[int(token_id) for token_id in eos_token_ids.split(",") if token_id],
    )
    checker = Checker(compiler)
    threading.stack_size(STACK_BYTES)
    checker.error_of(StructuredOutputsParams(json_object=True))  # whatever comes with the first one is there now
    limit_memory(MAX_MEMORY_BYTES)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        try:
            with limit_cpu(MAX_CPU_S):
                error = checker.error_of(StructuredOutputsParams(**json.loads(line)["params"]))
        except PagodaError as fault:
            error = fault.message
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
