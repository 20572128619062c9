"""Where the time of a start goes: gathers the marks of the services and prints a table. For --verbose."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pagoda_common.process.startup_marks import VARIABLE, parse_mark
from pagoda_common.process.supervisor import Service


@dataclass
class StartupTable:
    """Marks of services that are started now."""

    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    marks: list[tuple[str, float, str]] = field(default_factory=list)
    """Service, time and phase that ended then."""

    def marking(self, services: Sequence[Service]) -> tuple[Service, ...]:
        """The same services, with an environment in which they print marks."""
        return tuple(replace(service, environment={**service.environment, VARIABLE: "1"}) for service in services)

    def output(self, show: Callable[[str, str], None]) -> Callable[[str, str], None]:
        """A function for a supervisor's lines: keeps marks, passes other lines to `show`."""

        def take(service: str, line: str) -> None:
            mark = parse_mark(line)
            if mark is None:
                show(service, line)
            else:
                self.marks.append((service, *mark))

        return take

    def text(self) -> str:
        """One line a phase, ordered by its end: service, phase, its length, its end since the start."""
        lines = ["", f"  {'service':<10} {'phase':<22} {'took, s':>8} {'until, s':>9}"]
        last: dict[str, float] = {}
        for service, moment, phase in sorted(self.marks, key=lambda entry: entry[1]):
            took = moment - last.get(service, self.started)
            last[service] = moment
            lines.append(f"  {service:<10} {phase:<22} {took:>8.2f} {moment - self.started:>9.2f}")
        lines.append(f"  {'all':<10} {'ready':<22} {'':>8} {time.time() - self.started:>9.2f}")
        return "\n".join(lines)
