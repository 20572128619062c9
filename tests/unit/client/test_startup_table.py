"""Where the time of a start goes, as --verbose prints it."""

import pytest

from pagoda.server.startup_table import StartupTable
from pagoda_common.process.startup_marks import VARIABLE, enable_marks, mark, parse_mark
from pagoda_common.process.supervisor import Service


def test_marks_are_printed_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    enable_marks({})
    mark("imports")
    assert capsys.readouterr().err == ""
    enable_marks({VARIABLE: "1"})
    try:
        mark("load weights")
    finally:
        enable_marks({})
    found = parse_mark(capsys.readouterr().err.rstrip())
    assert found is not None
    assert found[0] > 1e9
    assert found[1] == "load weights"
    assert parse_mark("INFO 12:00:00 listening") is None


def test_services_are_told_to_print_marks() -> None:
    services = [Service(name="worker", command=("true",), environment={"KEY": "value"})]
    assert StartupTable().marking(services)[0].environment == {"KEY": "value", VARIABLE: "1"}


def test_a_table_gives_each_phase_its_length_and_its_end() -> None:
    table, shown = StartupTable(started=100.0), []
    take = table.output(lambda service, line: shown.append((service, line)))
    take("worker", "startup mark 101.5000 imports")
    take("frontend", "startup mark 100.7000 imports")
    take("worker", "INFO listening")
    take("worker", "startup mark 103.7500 load weights")
    assert shown == [("worker", "INFO listening")]
    lines = [line.split() for line in table.text().splitlines()]
    assert lines[2:5] == [
        ["frontend", "imports", "0.70", "0.70"],
        ["worker", "imports", "1.50", "1.50"],
        ["worker", "load", "weights", "2.25", "3.75"],
    ]
    assert lines[5][:2] == ["all", "ready"]
