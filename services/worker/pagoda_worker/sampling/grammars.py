"""Grammars: the compiled constraints of a model, made on a thread of their own and kept for the next request."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from threading import Event, Lock

from llguidance import LLMatcher

from pagoda_common.errors import InvalidRequest, ModelLoadError, PagodaError
from pagoda_common.grammar.bounded_grammar import TOO_COMPLEX, BoundedCompiler
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles, find_tokenizer_files

logger = logging.getLogger(__name__)

MAX_KEPT = 64
"""Compiled constraints that are remembered."""
MAX_WAIT_S = 10.0
"""A step does not wait longer for a constraint: its request fails, the others go on."""

Template = Future[LLMatcher]
"""A matcher at the start of an output, to be copied, or the error that it cannot be compiled."""


class Grammars:
    """Compiles each constraint once. May be called from any thread."""

    def __init__(self, load_compiler: Callable[[], BoundedCompiler]) -> None:
        """`load_compiler` is called once, when the first constraint comes."""
        self._load_compiler = load_compiler
        self._is_loaded = Event()
        self._thread = _new_thread()
        self._templates: OrderedDict[tuple[object, ...], Template] = OrderedDict()
        self._lock = Lock()

    @property
    def compiler(self) -> GrammarCompiler:
        """Raises ModelLoadError when there is no tokenizer."""
        return self._bounded.compiler

    @cached_property
    def _bounded(self) -> BoundedCompiler:
        return self._load_compiler()

    def template(self, params: StructuredOutputsParams) -> Template:
        """What to copy for an output under `params`; compiled soon if it is not known yet."""
        key = (
            params.kind,
            getattr(params, params.kind),
            params.disable_any_whitespace,
            params.disable_additional_properties,
            params.whitespace_pattern,
        )
        with self._lock:
            template = self._templates.get(key)
            if template is None or template.cancelled():
                template = self._templates[key] = self._thread.submit(self._compile, params)
                if len(self._templates) > MAX_KEPT:
                    self._templates.popitem(last=False)
            self._templates.move_to_end(key)
        return template

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an output, once it is compiled.

        Raises:
            PagodaError: it cannot be compiled, or takes too long.
        """
        while True:
            template = self.template(params)
            self._is_loaded.wait()
            try:
                return template.result(MAX_WAIT_S).deep_copy()
            except CancelledError:
                continue  # it stood behind one that took too long
            except TimeoutError:
                with self._lock:
                    stuck, self._thread = self._thread, _new_thread()
                stuck.shutdown(wait=False, cancel_futures=True)
                raise InvalidRequest(TOO_COMPLEX, field="structured_outputs") from None

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
        """The first constraint waits for the tokenizer as well, however long that takes."""
        try:
            _ = self.compiler
        finally:
            self._is_loaded.set()


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")


def no_compiler() -> BoundedCompiler:
    """Of a runner that serves nobody."""
    raise ModelLoadError("this model runner takes no structured outputs")


def load_tokenizer(model: str, *, revision: str | None) -> Tokenizer:
    """The checkpoint's tokenizer; one without tokenizer.json is converted by transformers.

    Raises:
        ModelLoadError: there is none that can be read.
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
    """For the outputs of a model.

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
