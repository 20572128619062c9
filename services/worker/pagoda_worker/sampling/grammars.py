"""Grammars: compiles the constraints of a model on separate threads, and keeps them for later requests."""

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from threading import Event, Lock, get_native_id

from llguidance import LLMatcher

from pagoda_common.errors import InvalidRequest, ModelLoadError, PagodaError, StaleEpoch
from pagoda_common.grammar.bounded_grammar import TOO_COMPLEX, BoundedCompiler
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles, find_tokenizer_files

logger = logging.getLogger(__name__)

MAX_KEPT = 32
"""Maximum number of cached compiled constraints, besides held ones, while the worker is busy."""
MAX_KEPT_BYTES = 128 * 1024
"""Maximum total size of these before compilation; compiled ones are up to 600 times as large."""
MAX_WAIT_S = 10.0
"""Seconds after which compilation is given up: the request fails, and others continue."""
MAX_HOLD_S = 60.0
"""Wall-clock seconds for a constraint outside of steps: a second of processor time may take that long on a busy
machine."""
NUM_THREADS = 2
"""Number of threads: as many as a scheduler's concurrent compilations."""
NICENESS = 5
"""Niceness of the threads, so that steps get the CPU first."""

Template = Future[LLMatcher]
"""A matcher at the start of an output, to copy, or the compilation error."""


class Grammars:
    """Compiles each constraint once. May be called from any thread."""

    def __init__(self, load_compiler: Callable[[], BoundedCompiler]) -> None:
        """`load_compiler` is called once, for the first constraint."""
        self._load_compiler = load_compiler
        self._is_loaded = Event()
        self._thread = _new_thread()
        self._templates: OrderedDict[tuple[object, ...], Template] = OrderedDict()
        self._sizes: dict[tuple[object, ...], int] = {}
        self._num_holders: Counter[tuple[object, ...]] = Counter()
        self._lock = Lock()
        self._load_lock = Lock()

    @property
    def compiler(self) -> GrammarCompiler:
        """Raises ModelLoadError when there is no tokenizer."""
        return self._bounded.compiler

    @cached_property
    def _bounded(self) -> BoundedCompiler:
        return self._load_compiler()

    def template(self, params: StructuredOutputsParams) -> Template:
        """The matcher to copy for an output under `params`; queued for compilation if it is not known yet."""
        key = params.grammar_key
        with self._lock:
            template = self._templates.get(key)
            if template is None or _is_void(template):
                template = self._templates[key] = self._thread.submit(self._compile, params)
                self._sizes[key] = params.num_bytes
            self._templates.move_to_end(key)
            self._forget_oldest()
        return template

    @contextmanager
    def held(self, params: StructuredOutputsParams) -> Iterator[None]:
        """Context in which the constraint is compiled (or being compiled) and not dropped."""
        key = params.grammar_key
        with self._lock:
            self._num_holders[key] += 1
        try:
            self.template(params)
            yield
        finally:
            with self._lock:
                self._num_holders[key] -= 1
                if not self._num_holders[key]:
                    del self._num_holders[key]
                self._forget_oldest()

    def drop(self, params: StructuredOutputsParams) -> None:
        """Drop a compiled constraint that takes more memory than its size suggests."""
        with self._lock:
            template = self._templates.get(params.grammar_key)
            if template is not None and template.done():
                del self._templates[params.grammar_key], self._sizes[params.grammar_key]

    def forget(self) -> bool:
        """Drop compiled constraints that are not held; returns whether there were any."""
        with self._lock:
            idle = [key for key, kept in self._templates.items() if kept.done() and key not in self._num_holders]
            for key in idle:
                del self._templates[key], self._sizes[key]
        return bool(idle)

    def _forget_oldest(self) -> None:
        idle = [key for key in self._templates if key not in self._num_holders]
        num_bytes = sum(self._sizes[key] for key in idle)
        for place, key in enumerate(idle[:-1]):  # the last one was just asked for
            if len(idle) - place <= MAX_KEPT and num_bytes <= MAX_KEPT_BYTES:
                break
            num_bytes -= self._sizes.pop(key)
            del self._templates[key]

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an output, once it is compiled.

        Raises:
            PagodaError: the constraint cannot be compiled, or takes too long.
        """
        while True:
            template = self.template(params)
            self._is_loaded.wait()
            try:
                return template.result(MAX_WAIT_S).deep_copy()
            except CancelledError:
                continue  # it waited for one that took too long
            except TimeoutError:
                raise self.give_up() from None

    def give_up(self) -> InvalidRequest:
        """A constraint has taken too long: move waiting ones to a new thread; returns the error to raise."""
        with self._lock:
            stuck, self._thread = self._thread, _new_thread()
        stuck.shutdown(wait=False, cancel_futures=True)
        return InvalidRequest(TOO_COMPLEX, field="structured_outputs")

    @property
    def is_loaded(self) -> bool:
        """Whether the time limit applies: the first constraint also waits for the tokenizer, without a limit."""
        return self._is_loaded.is_set()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        try:
            self._load()
            return self._bounded.compile(params)
        except PagodaError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            logger.exception("a constraint could not be compiled")
            raise PagodaError(f"structured_outputs could not be compiled: {error}"[:500]) from error

    def _load(self) -> None:
        try:
            with self._load_lock:
                _ = self.compiler
        finally:
            self._is_loaded.set()


def _is_void(template: Template) -> bool:
    """Whether the error is not caused by the constraint: it was never compiled, or failed for another reason."""
    if not template.done():
        return False
    return template.cancelled() or isinstance(template.exception(), StaleEpoch)  # asked before there was a model


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="grammars", initializer=_come_last)


def _come_last() -> None:
    """Lower the thread's priority; a worker that already has a lower one keeps it, because raising it is forbidden."""
    thread = get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def no_compiler() -> BoundedCompiler:
    """A compiler for runners without structured outputs."""
    raise ModelLoadError("this model runner takes no structured outputs")


def load_tokenizer(model: str, *, revision: str | None) -> Tokenizer:
    """The checkpoint's tokenizer; one without tokenizer.json is converted by transformers.

    Raises:
        ModelLoadError: there is no readable tokenizer.
    """
    try:
        return Tokenizer.load(model, revision=revision)
    except ModelLoadError as error:
        from transformers import AutoTokenizer  # seconds, and only old checkpoints need it

        try:
            directory = find_tokenizer_files(model, revision=revision)
            slow = AutoTokenizer.from_pretrained(directory)
            return Tokenizer(name=model, fast=slow.backend_tokenizer, files=TokenizerFiles.read(directory))
        except Exception:
            message = f"structured outputs need the model's tokenizer, and the worker has none: {error.message}"
            raise ModelLoadError(message) from error


def load_compiler(
    model: str, *, revision: str | None, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> BoundedCompiler:
    """The grammars for a model's outputs.

    Raises:
        ModelLoadError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(model, revision=revision)
    return BoundedCompiler(
        GrammarCompiler(tokenizer=tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids),
        tokenizer=model,
        revision=revision,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )
