"""Figures as short texts, bars and curves of characters; colours where they are wanted."""

from collections.abc import Sequence

EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = "▁▂▃▄▅▆▇█"
NOTHING = "–"


def count(value: float | None) -> str:
    """12,345; 3.4 for what is small."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """41 %; 0.4 % for what is small."""
    if share is None:
        return NOTHING
    return f"{share * 100:.1f} %" if 0 < share < 0.1 else f"{share * 100:.0f} %"


def seconds(value: float | None) -> str:
    """0.05 ms, 4.1 ms, 673 ms, 2.5 s."""
    if value is None:
        return NOTHING
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
    ms = value * 1000
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, full to `share`."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def curve(values: Sequence[float], width: int) -> str:
    """The last `width` values as a curve from 0 to the highest; blank for what is not known yet."""
    shown = list(values)[-width:] if width > 0 else []
    top = max(shown, default=0.0)
    marks = [HEIGHTS[min(7, int(value / top * 8))] if top else HEIGHTS[0] for value in shown]
    return "".join(marks).rjust(max(width, 0))


class Paint:
    """Colours of a terminal, or none."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def _painted(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_on and text else text

    def bold(self, text: str) -> str:
        """What counts."""
        return self._painted("1", text)

    def soft(self, text: str) -> str:
        """What names it."""
        return self._painted("2", text)

    def good(self, text: str) -> str:
        """Green."""
        return self._painted("32", text)

    def bad(self, text: str) -> str:
        """Red."""
        return self._painted("31", text)

    def hot(self, text: str) -> str:
        """Bars and curves."""
        return self._painted("33", text)


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """The last `width` values as `height` rows of columns, eight steps a row; the largest one fills them."""
    shown = list(values)[-width:]
    most = max([*shown, 1e-9])
    eighths = [round(value / most * height * 8) for value in shown]
    rows = []
    for row in reversed(range(height)):
        cells = ((" " + HEIGHTS)[min(8, max(0, eighth - 8 * row))] for eighth in eighths)
        rows.append("".join(cells).rjust(width))
    return rows
