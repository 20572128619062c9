"""Merges the metrics of several models into one text in Prometheus' format: each family once, a sample per model."""

import re
from collections.abc import Iterator, Mapping

OF_PROCESS = ("process_", "python_")
"""Prefix of families of the whole process: they are the same in every text."""
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?(?P<rest> .*)")
_MODEL_NAME = re.compile(r'(?:^|(?<=,))model_name="(?:[^"\\]|\\.)*"(?:,|$)')


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Merge `texts`: prometheus_client's output by model name.

    Every sample of a model gets its name as the label model_name, which replaces the old one.
    """
    families: dict[str, list[str]] = {}
    for model, text in texts.items():
        label = f'model_name="{_escaped(model)}"'
        for name, lines in _families(text.decode()):
            if name not in families:
                families[name] = [line for line in lines if line.startswith("#")]
            elif name.startswith(OF_PROCESS):
                continue
            samples = (line for line in lines if not line.startswith("#"))
            families[name] += samples if name.startswith(OF_PROCESS) else (_labelled(line, label) for line in samples)
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()


def _families(text: str) -> Iterator[tuple[str, list[str]]]:
    """The name and the lines of each family; a family begins with its HELP."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            if lines:
                yield name, lines
            name, lines = line.split(" ", 3)[2], []
        if line:
            lines.append(line)
    if lines:
        yield name, lines


def _labelled(line: str, label: str) -> str:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return line
    others = _MODEL_NAME.sub("", match["labels"] or "").rstrip(",")
    return f"{match['name']}{{{label}{',' if others else ''}{others}}}{match['rest']}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
