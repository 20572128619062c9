"""``pagoda top``: a live view of a running engine in the terminal."""

import argparse
import contextlib
import os
import select
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator

from pagoda.top.frame import draw
from pagoda.top.sample import Sample
from pagoda.top.source import FrontendSource, SchedulerSource, Source
from pagoda.top.text import Paint
from pagoda_common.config.flags.flags import add_security_flags, config_errors, security_config_from_args
from pagoda_common.errors import NotReady

DEFAULT_URL = "http://127.0.0.1:8000"
KEPT_SAMPLES = 120
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The alternate screen without a cursor, and back."""
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
HELP = "q ends · space pauses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, and how often."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, help="a frontend with /metrics (default: %(default)s)")
    group.add_argument("--scheduler", metavar="HOST:PORT", help="ask a scheduler over gRPC instead")
    add_security_flags(parser)
    group = parser.add_argument_group("view")
    group.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between frames (default: %(default)s)"
    )
    group.add_argument("--once", action="store_true", help="print one frame after the first interval, and end")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0, or 1 when --once gets no answer."""
    if not 0.1 <= args.interval <= 3600:
        parser.error(f"--interval is {args.interval:g}, must be between 0.1 and 3600 seconds")
    source: Source = FrontendSource(url=args.url)
    if args.scheduler:
        with config_errors(parser):
            source = SchedulerSource(address=args.scheduler, security=security_config_from_args(args))
    if args.once:
        return _print_once(source, args.interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("standard input and output are not a terminal; --once prints one frame")
    with contextlib.suppress(KeyboardInterrupt), _raw_terminal():
        _follow(source, args.interval)
    return 0


def _print_once(source: Source, interval_s: float) -> int:
    samples = [source.sample()]
    time.sleep(interval_s)
    samples.append(source.sample())
    width = shutil.get_terminal_size().columns
    paint = Paint(is_on=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    for line in draw(samples, name=source.name, reason=source.not_ready_reason(), width=width, paint=paint):
        print(line)
    return 0


def _follow(source: Source, interval_s: float) -> None:
    """Frame after frame until q."""
    samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
    paint = Paint(is_on="NO_COLOR" not in os.environ)
    is_paused, reason, answered = False, "", ""
    while True:
        if not is_paused:
            try:
                samples.append(source.sample())
                reason, answered = source.not_ready_reason(), time.strftime("%X")
            except NotReady as error:
                when = f"since {answered}: its figures are of then" if answered else "yet"
                reason = f"no answer {when} ({error.message})"
        _show(list(samples), source.name, reason, paint, "paused; " + HELP if is_paused else HELP)
        key = _key(interval_s)
        if key in ("q", "Q", "\x03", "\x04"):
            return
        is_paused = is_paused ^ (key == " ")


def _show(samples: list[Sample], name: str, reason: str, paint: Paint, hint: str) -> None:
    columns, rows = shutil.get_terminal_size()
    lines = draw(samples, name=name, reason=reason, width=columns, paint=paint, height=rows - 1)[: max(1, rows - 1)]
    lines += [""] * (rows - 1 - len(lines))
    text = "".join(f"{line}{CLEAR_LINE}\r\n" for line in lines)
    sys.stdout.write(f"{HOME}{text}{paint.soft(hint)}{CLEAR_LINE}{CLEAR_REST}")
    sys.stdout.flush()


def _key(timeout_s: float) -> str:
    """The key that was pressed within `timeout_s`; empty for none."""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Keys come one by one, on a screen of their own; everything is as before afterwards."""
    import termios  # only where there is a terminal
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
