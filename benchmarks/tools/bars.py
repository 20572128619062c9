"""Horizontal bars as SVG. Knows numbers and names; follows the reader's light or dark system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLORS = ("#4a7fd4", "#d9822b", "#3f9b5a", "#b35a9c")
"""One for each series, in their order; each has enough contrast on a light and on a dark card."""
STYLE = (
    "text{font:13px sans-serif;fill:#24292f}.title{font-weight:bold}.name{text-anchor:end}.card{fill:#fff}"
    ".mark{stroke:#24292f;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.card{fill:#20242b}.mark{stroke:#e6e6e6}}"
)
WIDTH, LEFT, RIGHT, BAR = 480, 122, 60, 16


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A picture of groups of bars, narrow enough for a phone."""

    title: str
    groups: Sequence[tuple[str, Mapping[str, float]]]
    """Names, each with the values of its bars by series."""
    unit: str = ""
    mark: float | None = None
    """Where a dashed line stands."""

    def svg(self) -> str:
        """The picture."""
        series = list(dict.fromkeys(name for _, bars in self.groups for name in bars))
        colors = dict(zip(series, COLORS, strict=False))
        scale = (WIDTH - LEFT - RIGHT) / max(max(bars.values()) for _, bars in self.groups)
        parts = [f'<text x="12" y="24" class="title">{escape(self.title)}</text>']
        start = top = 36 if len(series) == 1 else 60
        if len(series) > 1:
            parts += self._legend(colors)
        for group, bars in self.groups:
            middle = top + len(bars) * BAR / 2 + 5
            parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" class="name">{escape(group)}</text>')
            for name, value in bars.items():
                length = value * scale
                parts.append(
                    f'<rect x="{LEFT}" y="{top + 1}" width="{length:.1f}" height="{BAR - 2}" fill="{colors[name]}"/>'
                    f'<text x="{LEFT + length + 5:.1f}" y="{top + 13}">{value:.2f}{self.unit}</text>'
                )
                top += BAR
            top += 8
        if self.mark is not None:
            x = LEFT + self.mark * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{start - 4}" y2="{top - 4}" class="mark"/>')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
        card = f'<rect class="card" width="{WIDTH}" height="{top}" rx="6"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", card, *parts, "</svg>\n"])

    def _legend(self, colors: Mapping[str, str]) -> list[str]:
        parts, x = [], 12
        for name, color in colors.items():
            parts.append(f'<rect x="{x}" y="36" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{x + 15}" y="45">{escape(name)}</text>')
            x += 34 + 8 * len(name)
        return parts
