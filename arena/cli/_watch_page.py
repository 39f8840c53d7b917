"""A watch as one page of HTML that loads nothing and runs nothing: the curve and the report."""

from __future__ import annotations

import time
from html import escape

from arena._map_text import clean, size
from arena._version import __version__
from arena.cli._watch_report import Found, lines
from arena.cli._watched import Watched

__all__ = ["page"]

_WIDTH, _HEIGHT = 960, 320
_POINTS = 960  # of the curve: one for each unit of its width, the most of its samples
_STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem; max-width: 64rem; }
h1 { font-size: 1.3rem; margin: 0; }
table { border-collapse: collapse; margin-top: 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid #8884; font-variant-numeric: tabular-nums; }
th { font-weight: 600; white-space: nowrap; }
.growing td.state { background: #f443361f; }
svg { width: 100%; height: auto; margin-top: 1rem; border-bottom: 1px solid #8884; }
polyline { fill: none; stroke: #1976d2; stroke-width: 1.5; }
line { stroke: #d32f2f; stroke-width: 1.5; stroke-dasharray: 6 4; }
"""


def page(found: Found, watched: Watched) -> str:
    """The whole page. All that comes from the process is escaped."""
    title = escape(clean(f"{watched.name} (pid {watched.pid})"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    rows = "\n".join(
        f'<tr><th scope="row">{name}</th><td class="{name.partition(",")[0]}">'
        f"{escape(clean(told))}</td></tr>"
        for name, told in lines(found, watched)
    )
    taken = time.strftime("%Y-%m-%d %H:%M:%S %z")
    ended = f"<p>{escape(clean(watched.ended))}</p>" if watched.ended else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<title>arena: watch of {title}</title>
<style>{_STYLE}</style>
</head>
<body class="{found.state.replace(" ", "-")}">
<h1>{title}</h1>
<p>{taken}, tick-arena {__version__}</p>
{ended}
{_curve(found)}
<table>
{rows}
</table>
</body>
</html>
"""


def _curve(found: Found) -> str:
    """Resident memory over time, and the line whose slope is told."""
    samples = found.samples
    stride = -(-len(samples) // _POINTS)
    shown = [
        max(samples[index : index + stride], key=lambda one: one.resident)
        for index in range(0, len(samples), stride)
    ]
    start, end = samples[0].seconds, samples[-1].seconds
    low = min(one.resident for one in samples)
    high = max(one.resident for one in samples)
    across = _WIDTH / ((end - start) or 1.0)
    up = (_HEIGHT - 20) / ((high - low) or 1)

    def at(seconds: float, resident: float) -> tuple[str, str]:
        y = _HEIGHT - 10 - (resident - low) * up
        return f"{(seconds - start) * across:.1f}", f"{min(_HEIGHT, max(0.0, y)):.1f}"

    points = " ".join(",".join(at(one.seconds, one.resident)) for one in shown)
    line = ""
    trend = found.by_time
    if trend.known:
        began = trend.start * 60
        x1, y1 = at(began, trend.level - trend.slope * (end - began) / 60)
        x2, y2 = at(end, trend.level)
        line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
    told = f"{size(low)} to {size(high)} over {end - start:,.1f} s"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{told}</title>'
        f'<polyline points="{points}"/>{line}</svg><p>{told}</p>'
    )
