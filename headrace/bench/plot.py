"""A bench's figures as one SVG: each figure a line from its smallest to its largest round, with a dot at the median.

Written by hand, since one chart of this kind needs nothing a plotting package has. Figures have units of their own, so
each row has a scale of its own, from zero; a bar is drawn as a tick.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from headrace.bench.figures import Summary

_ROW, _NAME, _CHART, _VALUE, _MARGIN = 26, 300, 420, 90, 16
_FONT: Final = 'font-family="sans-serif" font-size="12"'


def write_plot(folder: Path, bench: str, summaries: Sequence[Summary]) -> Path:
    """Write `folder`/`bench`.svg and return its path. Raises OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}.svg"
    path.write_text(_svg(bench, summaries))
    return path


def _svg(bench: str, summaries: Sequence[Summary]) -> str:
    width = _NAME + _CHART + _VALUE + 2 * _MARGIN
    height = (len(summaries) + 1) * _ROW + 2 * _MARGIN
    rows = [_row(summary, _MARGIN + (number + 1) * _ROW) for number, summary in enumerate(summaries)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT}>',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-weight="bold">headrace bench {escape(bench)}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def _row(summary: Summary, top: int) -> str:
    left, middle = _MARGIN + _NAME, top + _ROW // 2
    most = max(summary.largest, summary.figure.bar or 0.0, 1e-9) * 1.1

    def x(number: float) -> str:
        return f"{left + max(number, 0.0) / most * _CHART:.1f}"

    parts = [
        f'<text x="{_MARGIN}" y="{middle + 4}">{escape(summary.figure.name)}</text>',
        f'<line x1="{left}" x2="{left + _CHART}" y1="{middle}" y2="{middle}" stroke="#e5e5e5"/>',
        (
            f'<line x1="{x(summary.smallest)}" x2="{x(summary.largest)}" y1="{middle}" y2="{middle}" '
            'stroke="#3b6ea5" stroke-width="6" stroke-opacity="0.4"/>'
        ),
        f'<circle cx="{x(summary.median)}" cy="{middle}" r="4" fill="#3b6ea5"/>',
        f'<text x="{left + _CHART + 8}" y="{middle + 4}">{summary.median:.4g}</text>',
    ]
    if summary.figure.bar is not None:
        parts.append(
            f'<line x1="{x(summary.figure.bar)}" x2="{x(summary.figure.bar)}" y1="{middle - 9}" y2="{middle + 9}" '
            'stroke="#b03030" stroke-width="2"/>'
        )
    return "\n".join(parts)
