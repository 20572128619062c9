"""Write the generated parts of the pages in docs/: ``python scripts/docs_pages.py``.

A generated part stands between two comments, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. The test
tests/unit/docs/test_generated_pages.py fails when a page is older than what it is made from.
"""

import argparse
import ast
import inspect
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import MagicMock, patch

import torch
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from pagoda import LLM, AsyncLLM
from pagoda.commands import serve
from pagoda.commands.arguments import CommandParser
from pagoda.options import refusals
from pagoda.options.engine_args import EngineArgs
from pagoda.options.llm_options import ALIASES, CONFIGS, UNBOUNDED
from pagoda.options.vllm_options import OPTIONS, REFUSED_FLAGS, VllmOption
from pagoda.v1 import types_pb2
from pagoda_common.config.flags import tables as flag_tables
from pagoda_common.config.flags.settings import option_actions
from pagoda_common.metrics.engine_metrics import EngineCollector
from pagoda_frontend.__main__ import make_parser as frontend_parser
from pagoda_frontend.http.app import make_app
from pagoda_frontend.observability.metrics import ConnectionCollector, RequestMetrics
from pagoda_frontend.serving.models import Models
from pagoda_scheduler.__main__ import make_parser as scheduler_parser
from pagoda_scheduler.observability.metrics import GroupCollector, HistogramTimeline, LoraCollector
from pagoda_worker.__main__ import make_parser as worker_parser
from pagoda_worker.metrics import WorkerCollector, WorkerMetrics

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMPATIBILITY = "accepted for compatibility with vLLM"
OWN_FLAGS = {
    *("--grpc-port", "--grpc-host", "--activation-quantization", "--reference-kernels"),
    *("--cpu-kv-cache-memory", "--snapshot-interval", "--preemption-mode", "--routing-policy"),
    *("--step-watchdog", "--orphan-lease", "--max-serving-groups", "--max-queued-share", "--lora-resolver-dir"),
    *("--tls-cert", "--tls-key", "--tls-ca", "--tls-server-name", "--service-token-file", "--insecure"),
    *("--log-format", "--enable-channelz", "--standby-workers", "--threads", "--enable-long-inputs"),
    *("--api-key-file", "--operator-key", "--operator-key-file", "--prefix-cache-isolation"),
    *("--allowed-weights", "--allowed-hosts", "--forwarded-allow-ips", "--max-request-body-size"),
    *("--max-request-values", "--max-unadmitted-size", "--sse-keep-alive-interval", "--keep-alive-timeout"),
    *("--send-timeout", "--enable-runtime-lora-updating", "--disable-status-page", "--max-stored-responses"),
    *("--scheduler-port", "--scheduler-metrics-port", "--worker-metrics-port", "--recovery-timeout", "--verbose"),
}
"""Flags that vLLM does not have."""
DIFFERENT_FLAGS = {
    "--host": "the default is 127.0.0.1; vLLM listens on every interface",
    "--quantization": "also int8 and int4 while loading; methods that are not in quantization.md are refused",
    "--load-format": "auto, safetensors or dummy; hf, mistral and gguf mean auto",
    "--model-impl": "pagoda instead of vllm; vllm is accepted too",
    "--attention-backend": "triton, flashinfer or flash_attn; vLLM's names for these are accepted",
    "--seed": "seeds only random weights; a request without a seed gets a random one",
    "--enforce-eager": "there is no compilation to turn off, only CUDA graphs",
    "--kv-cache-dtype": "int8 on CPU and GPU, fp8 (e4m3, scale 1) on GPU; no e5m2, no scales of checkpoints",
    "--max-num-seqs": "the default is 256 on every device",
    "--max-num-batched-tokens": "the default is 2048 on every device",
    "--max-num-queued-reqs": "limits waiting sequences per worker group, with a default; vLLM also counts running ones",
    "--max-num-queued-tokens": "has a default; vLLM has no limit",
    "--scheduling-policy": "also fair: divides the time fairly between API keys",
    "--speculative-config": "only the method ngram",
    "--structured-outputs-config": "only disable_any_whitespace and disable_additional_properties; there is one engine",
    "--collect-detailed-traces": "model, worker and all mean the same: the worker's part of each prefill chunk",
    "--drain-timeout": "the default is 30 s; vLLM aborts open requests at once",
    "--api-key": "also protects /pooling, /classify, /score, /rerank and /invocations",
    "--allowed-origins": "the default is none; vLLM allows every origin",
    "--enable-sleep-mode": "serves the endpoints; open requests wait instead of being aborted",
    "--ssl-certfile": "also serves the public gRPC port",
    "--ssl-keyfile": "also serves the public gRPC port",
    "--ssl-ca-certs": "clients then need a certificate, over HTTPS and gRPC",
    "--disable-log-stats": "turns off only the log line, not the metrics",
    "--device": "auto, cpu or cuda; newer versions of vLLM do not have this flag",
}
"""Flags of vLLM that Pagoda has with another meaning, default or set of values."""


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
        parts.append(f"## {_title(str(group.title))}\n\n{table}")
    return "\n\n".join(parts)


def _setting(action: argparse.Action) -> tuple[str, str, str, str]:
    flag = next(name for name in action.option_strings if name.startswith("--"))
    value = f" {action.metavar}" if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        value = f" {{{', '.join(map(str, action.choices))}}}"
    text = re.sub(r" ?\(default: .*\)$", "", action.help or "")
    default = re.search(r"\(default: (.*)\)$", action.help or "")
    shown = default[1] if default else ""
    if "%(default)s" in shown:
        shown = str(action.default)
    if action.default is True:
        shown = "on"
    return f"`{flag}{value}`", f"`PAGODA_{flag[2:].replace('-', '_').upper()}`", shown, text


def service_settings() -> str:
    """The flags that a service has and `pagoda serve` does not, by service."""
    of_serve = option_actions(serve_parser())
    parts = []
    for make in (frontend_parser, scheduler_parser, worker_parser):
        parser = make()
        own = [action for name, action in option_actions(parser).items() if name not in (*of_serve, "die-with-parent")]
        table = rows(("flag", "variable", "default", "what it does"), map(_setting, dict.fromkeys(own)))
        parts.append(f"### {parser.prog}\n\n{table}")
    return "\n\n".join(parts)


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def flags() -> str:
    """What becomes of vLLM's flags: those that Pagoda has, by group, then those without effect and those refused."""
    parts, taken = [], set()
    for group in serve_parser()._action_groups:
        cells = []
        for action in group._group_actions if group.title != COMPATIBILITY else ():
            names = [name for name in action.option_strings if not name.startswith("--no-")]
            flag = next((name for name in names if name.startswith("--")), "")
            if not flag or action.dest == "help":
                continue
            taken.add(flag)
            if flag not in OWN_FLAGS:
                note = DIFFERENT_FLAGS.get(flag, "")
                shown = ", ".join(f"`{name}`" for name in (flag, *(name for name in names if name != flag)))
                cells.append((shown, "differs" if note else "same", note))
        if cells:
            title = "Settings file" if group.title == "options" else _title(str(group.title))
            parts.append(f"### {title}\n\n{rows(('flag', 'state', 'note'), cells)}")
    others = [(f"`{option.flags[0]}`", *_state(option)) for option in OPTIONS if option.flags[0] not in taken]
    others += [(f"`{flag}`", "absent", reason) for flag, reason in REFUSED_FLAGS.items() if flag not in taken]
    idle = sorted((flag, note) for flag, state, note in others if state == "no effect")
    parts.append(f"### Accepted, without effect\n\n{rows(('flag', 'why'), idle)}")
    refused = sorted(row for row in others if row[1] != "no effect")
    parts.append(f"### Absent\n\n{rows(('flag', 'accepted values', 'why'), (_accepted(row) for row in refused))}")
    return "\n\n".join(parts)


def _accepted(row: tuple[str, str, str]) -> tuple[str, str, str]:
    return row[0], row[1].removeprefix("only ") if row[1].startswith("only ") else "none", row[2]


def own_flags() -> str:
    """The flags that vLLM does not have."""
    named = {name: action for action in option_actions(serve_parser()).values() for name in action.option_strings}
    return rows(("flag", "what it does"), ((f"`{flag}`", _setting(named[flag])[3]) for flag in sorted(OWN_FLAGS)))


def _state(option: VllmOption) -> tuple[str, str]:
    if option.neutral is None:
        return "no effect", option.reason
    values = [str(value) for value in dict.fromkeys(map(str, option.neutral)) if value not in ("False", "{}", "")]
    return (f"only {', '.join(values)}" if values else "absent"), option.reason


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


def llm_calls() -> str:
    """The calls of `LLM` that are not refused."""
    return _calls(LLM)


def async_llm_calls() -> str:
    """The calls of `AsyncLLM` that are not refused."""
    return _calls(AsyncLLM)


NOT_LISTED = {"check_params", "collect", "make_request", "open", "pool", "prompt_maker", "engine", "model_info"}
"""Public attributes that LLM and AsyncLLM use among themselves."""


def _calls(kind: type) -> str:
    refused = vars(refusals.RefusedCalls)
    names = dict.fromkeys(name for base in kind.__mro__ for name in vars(base) if not name.startswith("_"))
    return rows(
        ("call", "arguments", "what it does"),
        (_call(kind, name) for name in names if name not in NOT_LISTED and name not in refused),
    )


def _call(kind: type, name: str) -> tuple[str, str, str]:
    member = inspect.getattr_static(kind, name)
    text = " ".join((inspect.getdoc(member) or "").split()).partition(". ")[0].rstrip(".") + "."
    function = member.__func__ if isinstance(member, classmethod) else member
    if not inspect.isfunction(function):
        return f"`{name}`", "an attribute", text
    given = [one for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_KEYWORD]
    names = [f"`{one.name}`" for one in given if one.name not in ("self", "cls")]
    shown = ", ".join(names[:6]) + ", …" * (len(names) > 6)
    return f"`{name}()`", shown, text


def engine_args() -> str:
    """Every argument of `EngineArgs`, by config: type, default, what it does."""
    helps = {flag_tables.SPECULATIVE_FLAG.field: flag_tables.SPECULATIVE_FLAG}
    for name in dir(flag_tables):
        if name.endswith("_FLAGS"):
            helps.update({flag.field: flag for flag in getattr(flag_tables, name)})
    names = {field: name for name, field in ALIASES.items()}
    known = {field.name for field in fields(EngineArgs)}
    parts = []
    for part, config in CONFIGS.items():
        hints = get_type_hints(config)
        cells = [
            (
                f"`{names.get(field.name, field.name)}`",
                "dict" if helps[field.name].metavar == "JSON" else _python_type(hints[field.name]),
                _python_default(UNBOUNDED.get(field.name, field.default)),
                ARGUMENT_HELP.get(field.name, helps[field.name].help),
            )
            for field in fields(config)
            if field.name in known
        ]
        if part == "scheduler":
            cells.append(("`speculative_config`", "dict", "none", helps["speculative_config"].help))
        parts.append(f"### {_title(part)}\n\n{rows(('argument', 'type', 'default', 'meaning'), cells)}")
    return "\n\n".join(parts)


ARGUMENT_HELP = {
    "model": "directory or hub id of the checkpoint",
    "seed": "seed of random weights, and of the seeds of requests that have none",
}
"""Where an argument's meaning differs from its flag's."""


def _python_type(hint: Any) -> str:
    """A short word for a type; the values of a choice."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_python_type(one) for one in get_args(hint) if one is not types.NoneType)
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    return "list of str" if get_origin(hint) is tuple else str(hint.__name__)


def _python_default(value: object) -> str:
    return "none" if value in (None, "", ()) else str(value)


def http_calls() -> str:
    """Every path, with its statuses and the fields of its body, from the OpenAPI document."""
    serving = MagicMock()  # paths alone: nothing is served
    document = make_app(Models([serving]), [MagicMock()]).openapi()
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
        calls = "\n".join(
            f"- `{method.name}` ({'stream of ' * method.client_streaming}{_short(method.input_type)} → "
            f"{'stream of ' * method.server_streaming}{_short(method.output_type)}): {comments[6, index, 2, at]}"
            for at, method in enumerate(service.method)
        )
        yield f"## {service.name}\n\n{comments.get((6, index), '')}\n\n{calls}"
    for index, message in enumerate(file.message_type):
        fields = "\n".join(
            f"- `{field.name}` ({field.number}, {_field_type(field)}): {comments[4, index, 2, at]}"
            for at, field in enumerate(message.field)
        )
        yield f"### {message.name}\n\n{comments.get((4, index), '')}\n\n{fields or 'No fields.'}"


def _short(name: str) -> str:
    return name.rsplit(".", 1)[1]


def _field_type(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _short(field.type_name) if field.type_name else kind
    repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' * repeated}{'optional ' * field.proto3_optional}{name}"


def frontend_metrics() -> str:
    """What a frontend records of requests, and its connection to the scheduler."""
    registry = CollectorRegistry()
    registry.register(ConnectionCollector(engine=MagicMock(is_connected=True, num_losses=0)))
    RequestMetrics(registry=registry, model_name="", max_model_len=1)
    return _metrics(registry)


def engine_metrics() -> str:
    """The engine's load and steps, which schedulers and frontends serve."""
    registry = CollectorRegistry()
    load = types_pb2.EngineLoad(speculation=types_pb2.SpeculationLoad())
    registry.register(EngineCollector(load=lambda: load, model_name=""))
    HistogramTimeline(registry=registry)
    registry.register(GroupCollector(groups=MagicMock(groups={})))
    registry.register(LoraCollector(groups=MagicMock(groups={}), max_loras=1))
    return _metrics(registry)


def worker_metrics() -> str:
    """What a worker serves, with an accelerator."""
    registry = CollectorRegistry()
    WorkerMetrics(registry=registry)
    registry.register(WorkerCollector(worker=MagicMock(state="", facts=None, num_blocks=0)))
    memory = {"mem_get_info": lambda: (0, 0), "memory_allocated": lambda: 0, "memory_reserved": lambda: 0}
    with patch.multiple(torch.cuda, is_available=lambda: True, is_initialized=lambda: True, **memory):
        return _metrics(registry)


def _metrics(registry: CollectorRegistry) -> str:
    """Name as served, type, labels and help of every metric, by name."""
    families = sorted(registry.collect(), key=lambda family: family.name)
    return rows(("metric", "type", "labels", "meaning"), map(_metric, families))


def _metric(family: Metric) -> tuple[str, str, str, str]:
    labels = getattr(family, "_labelnames", None)  # of a family without samples, too
    if labels is None:
        labels = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    name = family.name + "_total" * (family.type == "counter")
    return f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation


PARTS: dict[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "migration.md": (("refused calls", refused_calls), ("flags", flags), ("own flags", own_flags)),
    "python.md": (("llm", llm_calls), ("async llm", async_llm_calls), ("engine args", engine_args)),
    "settings.md": (("settings", settings), ("services", service_settings)),
    "http_reference.md": (("http", http_calls),),
    "grpc_reference.md": (("grpc", grpc_calls),),
    "metrics.md": (
        *(("engine metrics", engine_metrics), ("request metrics", frontend_metrics)),
        ("worker metrics", worker_metrics),
    ),
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
