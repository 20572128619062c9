"""Matches patterns of an adapter's config against module names.

Knows names and regular expressions; no ranks, no tensors. Patterns are untrusted: one such as `(a+)+$` may search for
years, while Python lets no other thread run. So patterns that are more than a name are searched in a separate process,
with bounds on time and memory. It reads one JSON object ({"patterns": …, "modules": …}) and answers one: {"places": …}
or {"error": …}.
"""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from subprocess import DEVNULL, PIPE
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_common.process.job_limits import limit_cpu, limit_memory

MAX_CPU_S = 2.0
MAX_JOB_S = 60.0
"""Wall-clock seconds, on a busy machine."""
MAX_MEMORY_BYTES = 256 << 20
MAX_PATTERNS = 4096
"""Matches patterns that are more than names."""
MAX_PATTERN_CHARS = 1024
_NAME = re.compile(r"[\w.-]+")


def places_of(patterns: Sequence[str], modules: Collection[str]) -> dict[str, int]:
    """The index of the first pattern that matches the end of a module's name, from a dot, as in peft; only for modules
    with a match.

    Raises:
        ModelLoadError: a pattern is not a regular expression, or they take too much time or memory.
    """
    names = {pattern: place for place, pattern in enumerate(patterns) if _NAME.fullmatch(pattern)}
    found: dict[str, int] = {}
    for module in modules if names else ():
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        places = [names[module[start:]] for start in starts if module[start:] in names]
        if places:
            found[module] = min(places)
    others = {place: pattern for place, pattern in enumerate(patterns) if pattern not in names}
    if others:
        order = list(others)
        for module, index in _searched(list(others.values()), list(modules)).items():
            found[module] = min(found.get(module, order[index]), order[index])
    return found


def _searched(patterns: list[str], modules: list[str]) -> dict[str, int]:
    if len(patterns) > MAX_PATTERNS:
        raise ModelLoadError(f"there are {len(patterns)} regular expressions, must be at most {MAX_PATTERNS}")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ModelLoadError(
                f"the regular expression {pattern[:100]!r}… has {len(pattern)} characters, must have at most "
                f"{MAX_PATTERN_CHARS}"
            )
    job = json.dumps({"patterns": patterns, "modules": modules}).encode()
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=job, stdout=PIPE, stderr=DEVNULL, timeout=MAX_JOB_S, start_new_session=True, check=False
        )
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, OSError, ValueError):  # the kernel has ended it: it answers nothing
        raise ModelLoadError(
            f"its regular expressions, such as {patterns[0][:100]!r}, take more than {MAX_CPU_S:g} s or "
            f"{MAX_MEMORY_BYTES >> 20} MiB to be searched"
        ) from None
    if "error" in answer:
        raise ModelLoadError(answer["error"])
    return dict(answer["places"])


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    rules = []
    for pattern in job["patterns"]:
        try:
            rules.append(re.compile(rf"(.*\.)?({pattern})$"))
        except (re.error, OverflowError, RecursionError) as error:
            return {"error": f"{pattern[:100]!r} is not a regular expression: {error}"}
    found = []
    for module in job["modules"]:
        place = next((place for place, rule in enumerate(rules) if rule.match(module)), None)
        if place is not None:
            found.append((module, place))
    return {"places": found}


def main() -> None:
    """Run the job from standard input."""
    limit_memory(MAX_MEMORY_BYTES)
    with limit_cpu(MAX_CPU_S):
        print(json.dumps(_answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
