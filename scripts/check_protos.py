"""Check protos/ for style, and against the contracts of released versions: ``python scripts/check_protos.py``.

A rolling update mixes versions N and N-1, so nothing may change that either of them would misread. The contracts of
each version are a FileDescriptorSet, tests/compat/vN.binpb; ``--write FILE`` writes today's, for a release. Style is
what buf's STANDARD rules ask, with the exceptions below.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
PREVIOUS = ROOT / "tests" / "compat" / "v0.1.0.binpb"
RELEASED = sorted(PREVIOUS.parent.glob("v*.binpb"))
"""The previous version's contracts and this version's own, as it was released."""

PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")

RPC_TYPES = {
    # Messages that flow both ways on a long-lived stream are not named as requests and responses.
    "Scheduler.Session": ("FrontendMessage", "SchedulerMessage"),
    "Scheduler.RegisterWorker": ("WorkerRegistration", "RegisterWorkerResponse"),
    # The hot path keeps the names that the field knows from vLLM's executor.
    "Worker.Execute": ("ExecuteModelRequest", "SamplerOutput"),
    "Worker.ExecuteModel": ("ExecuteModelRequest", "SamplerOutput"),
    "Worker.LoadModel": ("LoadModelRequest", "LoadModelProgress"),
    # Every call that reads weights reports progress with the same message.
    "Worker.PrepareWeights": ("PrepareWeightsRequest", "LoadModelProgress"),
    "Worker.ReloadWeights": ("WorkerReloadWeightsRequest", "LoadModelProgress"),
    # Scheduler and worker have calls of these names; their messages share a package.
    "Worker.Sleep": ("WorkerSleepRequest", "WorkerSleepResponse"),
    "Worker.WakeUp": ("WorkerWakeUpRequest", "WorkerWakeUpResponse"),
    "Worker.AddLora": ("WorkerAddLoraRequest", "WorkerAddLoraResponse"),
    "Worker.RemoveLora": ("WorkerRemoveLoraRequest", "WorkerRemoveLoraResponse"),
    "Worker.PinLora": ("WorkerPinLoraRequest", "WorkerPinLoraResponse"),
    "Worker.ListLoras": ("WorkerListLorasRequest", "WorkerListLorasResponse"),
    # One message in several places: a request over Session and Generate, load and model wherever they are told.
    "Scheduler.Generate": ("SubmitRequest", "TokenOutput"),
    "Scheduler.GetLoad": ("GetLoadRequest", "EngineLoad"),
    "Scheduler.GetModelInfo": ("GetSchedulerModelInfoRequest", "ModelInfo"),
    # The same question, answered at once or as a stream.
    "Inference.GenerateUnary": ("GenerateRequest", "GenerateUnaryResponse"),
    "Inference.ChatUnary": ("ChatRequest", "ChatUnaryResponse"),
    # Two services have an Abort; their messages share a package.
    "Inference.Abort": ("AbortGenerationRequest", "AbortGenerationResponse"),
}
"""RPCs whose messages are not <Rpc>Request and <Rpc>Response."""

Message = descriptor_pb2.DescriptorProto
Enum = descriptor_pb2.EnumDescriptorProto
Field = descriptor_pb2.FieldDescriptorProto
FileSet = descriptor_pb2.FileDescriptorSet


def read_contracts(path: Path) -> FileSet:
    """The contracts in a file."""
    return FileSet.FromString(path.read_bytes())


def compile_contracts(protos: Path = PROTOS) -> FileSet:
    """The contracts of a folder of .proto files, with comments.

    Raises:
        RuntimeError: protoc refused a file; its message is on stderr.
    """
    from grpc_tools import protoc

    names = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "contracts.binpb"
        options = [f"-I{protos}", f"-I{files('grpc_tools') / '_proto'}", f"--descriptor_set_out={target}"]
        if protoc.main(["protoc", *options, "--include_source_info", *names]) != 0:
            raise RuntimeError(f"protoc refused the files in {protos}")
        return read_contracts(target)


def breaking_changes(old: FileSet, new: FileSet) -> list[str]:
    """What a peer that speaks `old` would misread in `new`, one line each."""
    return [*_changed_messages(old, new), *_changed_enums(old, new), *_changed_services(old, new)]


def _changed_messages(old: FileSet, new: FileSet) -> Iterator[str]:
    messages = dict(_messages(new))
    for name, was in _messages(old):
        if (now := messages.get(name)) is None:
            yield f"message {name} is gone"
            continue
        by_number = {field.number: field for field in now.field}
        for field in was.field:
            if (same := by_number.get(field.number)) is None:
                if not _is_reserved(now, field):
                    yield f"{name}.{field.name} = {field.number} is gone; number and name must be reserved"
                continue
            for what, before, after in zip(FIELD_FACTS, _facts(was, field), _facts(now, same), strict=True):
                if before != after:
                    yield f"{name}.{field.name} = {field.number}: {what} was {before}, is {after}"
        for taken in was.reserved_range:
            for number in range(taken.start, min(taken.end, taken.start + 1000)):
                if number in by_number:
                    yield f"{name}.{by_number[number].name} = {number} takes a reserved number"


FIELD_FACTS = ("name", "type", "label", "oneof", "presence")


def _facts(message: Message, field: Field) -> tuple[str, str, str, str, str]:
    """Everything about a field that a peer depends on; names count, because JSON and code have them."""
    kind = field.type_name or Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = Field.Label.Name(field.label).removeprefix("LABEL_").lower()
    is_member = field.HasField("oneof_index") and not field.proto3_optional
    oneof = message.oneof_decl[field.oneof_index].name if is_member else "none"
    return field.name, kind, label, oneof, "optional" if field.proto3_optional else "implicit"


def _is_reserved(message: Message, field: Field) -> bool:
    has_number = any(taken.start <= field.number < taken.end for taken in message.reserved_range)
    return has_number and field.name in message.reserved_name


def _changed_enums(old: FileSet, new: FileSet) -> Iterator[str]:
    enums = dict(_enums(new))
    for name, was in _enums(old):
        if (now := enums.get(name)) is None:
            yield f"enum {name} is gone"
            continue
        names = {value.number: value.name for value in now.value}
        for value in was.value:
            if value.number not in names:
                yield f"{name}.{value.name} = {value.number} is gone"
            elif names[value.number] != value.name:
                yield f"{name}.{value.name} = {value.number}: name is now {names[value.number]}"


def _changed_services(old: FileSet, new: FileSet) -> Iterator[str]:
    methods = dict(_methods(new))
    for name, was in _methods(old):
        if (now := methods.get(name)) is None:
            yield f"rpc {name} is gone"
        elif was != now:
            yield f"rpc {name} was {_signature(was)}, is {_signature(now)}"


def _signature(method: descriptor_pb2.MethodDescriptorProto) -> str:
    streams = ("", "stream ")
    asked, answered = streams[method.client_streaming], streams[method.server_streaming]
    return f"({asked}{method.input_type}) returns ({answered}{method.output_type})"


def style_faults(contracts: FileSet) -> list[str]:
    """Where `contracts` leave the style, one line each."""
    faults: list[str] = []
    for file in contracts.file:
        if not re.fullmatch(r"[a-z][a-z0-9.]*\.v[0-9]+", file.package):
            faults.append(f"{file.name}: package {file.package} does not end with a version")
        elif Path(file.name).parent != Path(*file.package.split(".")):
            faults.append(f"{file.name}: package {file.package} belongs in the folder of that name")
        if file.syntax != "proto3":
            faults.append(f"{file.name}: syntax is {file.syntax or 'proto2'}, must be proto3")
        if not SNAKE.fullmatch(Path(file.name).stem):
            faults.append(f"{file.name}: file names are lower_snake_case")
        faults += _uncommented(file)
    for name, message in _messages(contracts):
        if not PASCAL.fullmatch(message.name):
            faults.append(f"message {name} is not PascalCase")
        members = [field.name for field in message.field] + [
            one.name for one in message.oneof_decl if one.name[0] != "_"
        ]
        faults += [f"{name}.{member} is not lower_snake_case" for member in members if not SNAKE.fullmatch(member)]
    for name, enum in _enums(contracts):
        faults += _enum_faults(name, enum)
    for name, method in _methods(contracts):
        faults += _method_faults(name, method)
    return faults


def _enum_faults(name: str, enum: Enum) -> Iterator[str]:
    if not PASCAL.fullmatch(enum.name):
        yield f"enum {name} is not PascalCase"
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    for value in enum.value:
        if not UPPER.fullmatch(value.name) or not value.name.startswith(prefix):
            yield f"{name}.{value.name} does not begin with {prefix}"
    if enum.value[0].number != 0 or not enum.value[0].name.endswith("_UNSPECIFIED"):
        yield f"{name}: the value 0 must come first and end with _UNSPECIFIED"


def _method_faults(name: str, method: descriptor_pb2.MethodDescriptorProto) -> Iterator[str]:
    if not PASCAL.fullmatch(method.name):
        yield f"rpc {name} is not PascalCase"
    short = ".".join(name.split(".")[-2:])
    expected = RPC_TYPES.get(short, (f"{method.name}Request", f"{method.name}Response"))
    types = (method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2])
    for was, must in zip(types, expected, strict=True):
        if was != must:
            yield f"rpc {short}: {was} must be {must}"


def _uncommented(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    """Fields, enum values and RPCs without a comment. Nothing, where the comments were not compiled in."""
    commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    if not file.source_code_info.location:
        return
    for number, message in enumerate(file.message_type):
        for index, field in enumerate(message.field):
            if (4, number, 2, index) not in commented:
                yield f"{file.package}.{message.name}.{field.name} has no comment"
    for number, enum in enumerate(file.enum_type):
        for index, value in enumerate(enum.value):
            if (5, number, 2, index) not in commented:
                yield f"{file.package}.{enum.name}.{value.name} has no comment"
    for number, service in enumerate(file.service):
        for index, method in enumerate(service.method):
            if (6, number, 2, index) not in commented:
                yield f"{file.package}.{service.name}.{method.name} has no comment"


def _messages(contracts: FileSet) -> Iterator[tuple[str, Message]]:
    for file in contracts.file:
        for message in file.message_type:
            yield from _nested(f"{file.package}.{message.name}", message)


def _nested(name: str, message: Message) -> Iterator[tuple[str, Message]]:
    yield name, message
    for inner in message.nested_type:
        yield from _nested(f"{name}.{inner.name}", inner)


def _enums(contracts: FileSet) -> Iterator[tuple[str, Enum]]:
    for file in contracts.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in _messages(contracts):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _methods(contracts: FileSet) -> Iterator[tuple[str, descriptor_pb2.MethodDescriptorProto]]:
    for file in contracts.file:
        for service in file.service:
            for method in service.method:
                yield f"{file.package}.{service.name}.{method.name}", method


def main() -> int:
    """Print every fault; returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write today's contracts there, and check nothing")
    args = parser.parse_args()
    today = compile_contracts()
    if args.write is not None:
        for file in today.file:
            file.ClearField("source_code_info")
        args.write.write_bytes(today.SerializeToString(deterministic=True))
        return 0
    faults = style_faults(today)
    for snapshot in RELEASED:
        faults += [f"since {snapshot.stem}: {fault}" for fault in breaking_changes(read_contracts(snapshot), today)]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
