"""The contracts keep their style, and versions N and N-1 read each other."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from pagoda_common.version import VERSION

pytest.importorskip("grpc_tools")

CHECKS = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_protos.py"))
FileSet = descriptor_pb2.FileDescriptorSet


@pytest.fixture(scope="module")
def today() -> FileSet:
    return CHECKS["compile_contracts"]()


def contracts_with(change: Callable[[Any], None]) -> FileSet:
    """The previous contracts, where `change` has been made to scheduler.proto."""
    contracts = CHECKS["read_contracts"](CHECKS["PREVIOUS"])
    change(next(file for file in contracts.file if file.name.endswith("scheduler.proto")))
    return contracts


@pytest.mark.parametrize("snapshot", CHECKS["RELEASED"], ids=lambda path: path.stem)
def test_nothing_has_changed_that_a_released_version_would_misread(today: FileSet, snapshot: Path) -> None:
    assert CHECKS["breaking_changes"](CHECKS["read_contracts"](snapshot), today) == []


def test_this_version_has_a_snapshot_of_its_contracts() -> None:
    assert [path.name for path in CHECKS["RELEASED"]][-1] == f"v{VERSION}.binpb"


def test_the_contracts_keep_their_style(today: FileSet) -> None:
    assert CHECKS["style_faults"](today) == []


def test_every_exception_of_the_style_is_still_one(today: FileSet) -> None:
    methods = {".".join(name.split(".")[-2:]) for name, _ in CHECKS["_methods"](today)}
    assert set(CHECKS["RPC_TYPES"]) <= methods


def field_of(file: Any, message: str, field: str) -> Any:
    found = next(one for one in file.message_type if one.name == message)
    return next(one for one in found.field if one.name == field)


def remove(file: Any, message: str, field: str) -> None:
    found = next(one for one in file.message_type if one.name == message)
    found.field.remove(field_of(file, message, field))


BREAKING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda file: setattr(field_of(file, "SubmitRequest", "tenant"), "number", 99), "tenant = 12 is gone"),
    "name": (lambda file: setattr(field_of(file, "SubmitRequest", "tenant"), "name", "who"), "name was tenant, is who"),
    "type": (lambda file: setattr(field_of(file, "SubmitRequest", "attempt"), "type", 3), "type was uint32, is int64"),
    "message type": (
        lambda file: setattr(field_of(file, "SubmitRequest", "resume"), "type_name", ".pagoda.v1.TokenIds"),
        "type was .pagoda.v1.ResumeState, is .pagoda.v1.TokenIds",
    ),
    "label": (lambda file: setattr(field_of(file, "SubmitRequest", "slots"), "label", 1), "label was repeated"),
    "oneof": (lambda file: field_of(file, "FrontendMessage", "abort").ClearField("oneof_index"), "oneof was message"),
    "field": (lambda file: remove(file, "SubmitRequest", "priority"), "priority = 7 is gone"),
    "message": (lambda file: file.message_type.pop(), "message pagoda.v1.WorkerState is gone"),
    "enum value": (lambda file: file.enum_type[0].value.pop(), "EARLY_STOPPING_NEVER = 3 is gone"),
    "enum name": (lambda file: setattr(file.enum_type[0].value[1], "name", "EARLY_STOPPING_X"), "name is now"),
    "rpc": (lambda file: file.service[0].method.pop(), "rpc pagoda.v1.Scheduler.GetMetrics is gone"),
    "stream": (lambda file: setattr(file.service[0].method[1], "server_streaming", False), "rpc pagoda.v1.Scheduler.G"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_a_breaking_change_is_found(name: str) -> None:
    change, message = BREAKING[name]
    found = CHECKS["breaking_changes"](CHECKS["read_contracts"](CHECKS["PREVIOUS"]), contracts_with(change))
    assert any(message in line for line in found), found


def test_a_field_may_go_where_its_number_and_name_are_reserved() -> None:
    def retire(file: Any) -> None:
        remove(file, "SubmitRequest", "priority")
        message = next(one for one in file.message_type if one.name == "SubmitRequest")
        message.reserved_range.add(start=7, end=8)
        message.reserved_name.append("priority")

    assert CHECKS["breaking_changes"](CHECKS["read_contracts"](CHECKS["PREVIOUS"]), contracts_with(retire)) == []


def test_what_is_added_breaks_nothing() -> None:
    def add(file: Any) -> None:
        file.message_type.add(name="Novelty").field.add(name="value", number=1, type=9, label=1)
        file.message_type[0].field.add(name="novelty", number=77, type=9, label=1)

    assert CHECKS["breaking_changes"](CHECKS["read_contracts"](CHECKS["PREVIOUS"]), contracts_with(add)) == []


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "package": (lambda file: setattr(file, "package", "pagoda"), "does not end with a version"),
    "enum zero": (lambda file: file.enum_type[0].value.__delitem__(0), "must come first"),
    "enum prefix": (lambda file: setattr(file.enum_type[0].value[1], "name", "FIRST"), "begin with EARLY_STOPPING_"),
    "field": (lambda file: setattr(file.message_type[0].field[0], "name", "theHello"), "theHello is not lower_snake"),
    "message": (lambda file: setattr(file.message_type[1], "name", "release_requests"), "is not PascalCase"),
    "rpc": (lambda file: setattr(file.service[0].method[9], "input_type", ".pagoda.v1.DrainRequest"), "AdoptRequest"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_style_is_found(name: str) -> None:
    change, message = FAULTS[name]
    found = CHECKS["style_faults"](contracts_with(change))
    assert any(message in line for line in found), found


def test_a_field_without_a_comment_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "pagoda" / "v1"
    folder.mkdir(parents=True)
    text = 'syntax = "proto3";\npackage pagoda.v1;\nmessage A {\n  // Why.\n  uint32 b = 1;\n  uint32 c = 2;\n}\n'
    (folder / "a.proto").write_text(text)
    assert CHECKS["style_faults"](CHECKS["compile_contracts"](tmp_path)) == ["pagoda.v1.A.c has no comment"]
