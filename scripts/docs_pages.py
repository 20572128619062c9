"""Write the generated parts of the pages in docs/: ``python scripts/docs_pages.py``.

A generated part stands between two comments, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. The test
tests/unit/docs/test_generated_pages.py fails when a page is older than what it is made from.
"""

import argparse
import ast
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from pagoda.commands import serve
from pagoda.commands.arguments import CommandParser
from pagoda.options import refusals
from pagoda.options.vllm_options import OPTIONS, REFUSED_FLAGS, VllmOption
from pagoda_common.config.settings import option_actions
from pagoda_frontend.http.app import make_app

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMPATIBILITY = "accepted for compatibility with vLLM"


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `pagoda serve`."""
    parser = CommandParser(prog="pagoda serve", add_help=False)
    parser.fill_later(serve.add_arguments)
    parser.fill()
    return parser


def rows(head: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def settings() -> str:
    """The flags of `pagoda serve` by group."""
    parser = serve_parser()
    known = {action.dest for action in option_actions(parser).values()}
    parts = []
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest in known]
        if group.title == COMPATIBILITY or not actions:
            continue
        table = rows(("flag", "variable", "default", "what it does"), (_setting(action) for action in actions))
        parts.append(f"## {str(group.title).capitalize()}\n\n{table}")
    return "\n\n".join(parts)


def _setting(action: argparse.Action) -> tuple[str, str, str, str]:
    flag = next(name for name in action.option_strings if name.startswith("--"))
    value = f" {action.metavar}" if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        value = f" {{{','.join(map(str, action.choices))}}}"
    text = re.sub(r" ?\(default: .*\)$", "", action.help or "")
    default = re.search(r"\(default: (.*)\)$", action.help or "")
    shown = default[1] if default else ""
    if "%(default)s" in shown:
        shown = str(action.default)
    return f"`{flag}{value}`", f"`PAGODA_{flag[2:].replace('-', '_').upper()}`", shown, text


def flags() -> str:
    """What becomes of vLLM's flags: those that are taken, then those that are not."""
    own = [
        next(name for name in action.option_strings if name.startswith("--"))
        for group in serve_parser()._action_groups
        if group.title != COMPATIBILITY
        for action in group._group_actions
        if action.option_strings and action.dest != "help"
    ]
    taken = {flag for flag in own if not flag.startswith("--no-")}
    others = [(f"`{option.flags[0]}`", *_state(option)) for option in OPTIONS if option.flags[0] not in taken]
    others += [(f"`{flag}`", "refused", reason) for flag, reason in REFUSED_FLAGS.items() if flag not in taken]
    table = rows(("flag", "state", "why"), sorted(others))
    listed = ", ".join(f"`{flag}`" for flag in sorted(taken))
    return f"**Taken** ([what each does](settings.md)): {listed}.\n\n{table}"


def _state(option: VllmOption) -> tuple[str, str]:
    if option.neutral is None:
        return "no effect", option.reason
    values = [str(value) for value in dict.fromkeys(map(str, option.neutral)) if value not in ("False", "{}", "")]
    return (f"only {' or '.join(values)}" if values else "refused"), option.reason


def refused_calls() -> str:
    """The calls that `LLM` refuses, with the reason that the call gives."""
    tree = ast.parse(inspect.getsource(refusals.RefusedCalls))
    return rows(("call", "why"), ((f"`{name}`", reason) for name, reason in _refusals(tree)))


def _refusals(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        texts = [node.value for node in ast.walk(function.body[-1]) if isinstance(node, ast.Constant)]
        yield function.name, str(texts[1])


def http_calls() -> str:
    """Every path, with its statuses and the fields of its body, from the OpenAPI document."""
    document = make_app(MagicMock(), MagicMock()).openapi()  # paths alone: nothing is served
    schemas = document["components"]["schemas"]
    parts = []
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            statuses = ", ".join(status for status in call["responses"])
            text = " ".join(f"{call.get('summary', '')} {call.get('description', '')}".split())
            part = f"### {method.upper()} {path}\n\n{text}\n\nAnswers: {statuses}."
            content = call.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                part += "\n\n" + _body_table(_resolved(content["application/json"]["schema"], schemas), schemas)
            parts.append(part)
    return "\n\n".join(parts)


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    return found


def _body_table(body: dict[str, Any], schemas: dict[str, Any]) -> str:
    required = body.get("required", [])
    cells = (
        (f"`{name}`", _kind(field, schemas), "required" if name in required else _json_default(field))
        for name, field in body.get("properties", {}).items()
    )
    return rows(("field", "type", "default"), cells)


def _kind(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A short word for the type of a field."""
    if "anyOf" in field or "oneOf" in field:
        kinds = dict.fromkeys(_kind(one, schemas) for one in field.get("anyOf") or field["oneOf"])
        kinds.pop("null", None)
        return " or ".join(kinds) if len(kinds) <= 4 else "one of several shapes"
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if "$ref" in field:
        found = _resolved(field, schemas)
        return _kind(found, schemas) if "anyOf" in found or "enum" in found else "object"
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_kind(field.get('items', {}), schemas)}"
    return ", ".join(kind) if isinstance(kind, list) else str(kind)


def _json_default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def grpc_calls() -> str:
    """Services and messages of pagoda.v1, with the comments of the contracts."""
    with tempfile.NamedTemporaryFile() as output:
        names = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
        includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments = ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={output.name}", *names]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refused the contracts; its message is on stderr")
        contracts = descriptor_pb2.FileDescriptorSet.FromString(Path(output.name).read_bytes())
    return "\n\n".join(part for file in contracts.file for part in _contract(file))


def _contract(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(at.path): " ".join((at.leading_comments or at.trailing_comments).split())
        for at in file.source_code_info.location
    }
    for index, service in enumerate(file.service):
        cells = (
            (
                f"`{method.name}`",
                f"{'stream of ' * method.client_streaming}{_short(method.input_type)}",
                f"{'stream of ' * method.server_streaming}{_short(method.output_type)}",
                comments.get((6, index, 2, at), ""),
            )
            for at, method in enumerate(service.method)
        )
        table = rows(("call", "takes", "gives", "what it does"), cells)
        yield f"## {service.name}\n\n{comments.get((6, index), '')}\n\n{table}"
    for index, message in enumerate(file.message_type):
        cells = (
            (f"`{field.name}`", str(field.number), _field_type(field), comments.get((4, index, 2, at), ""))
            for at, field in enumerate(message.field)
        )
        table = rows(("field", "number", "type", "meaning"), cells) if message.field else "No fields."
        yield f"### {message.name}\n\n{comments.get((4, index), '')}\n\n{table}"


def _short(name: str) -> str:
    return name.rsplit(".", 1)[1]


def _field_type(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _short(field.type_name) if field.type_name else kind
    repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' * repeated}{'optional ' * field.proto3_optional}{name}"


PARTS: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "migration.md": (("refused calls", refused_calls), ("flags", flags)),
    "settings.md": (("settings", settings),),
    "http_reference.md": (("http", http_calls),),
    "grpc_reference.md": (("grpc", grpc_calls),),
}
"""Generated parts by page."""


def with_part(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks of `name`.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin} and {end} once each")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def generated(name: str) -> str:
    """The page as it should be."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for part, make in PARTS[name]:
        page = with_part(page, part, make())
    return page


if __name__ == "__main__":
    for name in PARTS:
        (DOCS / name).write_text(generated(name), encoding="utf-8")
