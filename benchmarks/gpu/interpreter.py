"""Triton's interpreter without the work whose result is thrown away, which is a third of its time."""

from types import ModuleType, SimpleNamespace
from typing import Any


def spare_work(interpreter: ModuleType) -> None:
    """Change a freshly imported `triton.runtime.interpreter`; every kernel gives what it gave."""
    _patch_once(interpreter)
    _look_types_up_once(interpreter)
    # Each sum and product of int32 is computed again in int64 for an assertion, which needs debug=True to say anything.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_once(interpreter: ModuleType) -> None:
    """Patch the language for the first function of a module alone, and leave it so.

    The interpreter does it for every function that a kernel calls, tl.sum included.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_unless_done(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_unless_done


def _look_types_up_once(interpreter: ModuleType) -> None:
    """Remember NumPy's type of each of Triton's: the interpreter builds its table for every operation."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = known_type
