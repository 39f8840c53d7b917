"""The map of what escapes as one page of HTML that loads nothing: a table to sort, and curves."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from arena._map_text import clean, headline, place, size, source
from arena._version import __version__

if TYPE_CHECKING:
    from arena._rising import History
    from arena.escapes import Escape, EscapeMap, Frame

__all__ = ["page"]

_LONG = 2_000  # characters of an example or a line: a page has room
_AROUND = 3  # source lines on each side of the one that allocated
_WIDTH, _HEIGHT = 120, 28  # of a curve

_STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid #8884; }
th { white-space: nowrap; }
th button { font: inherit; font-weight: 600; border: 0; background: none; cursor: pointer;
  padding: 0; color: inherit; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.grows { background: #f443361f; }
.freed { opacity: .55; }
.hide-freed .freed { display: none; }
code, pre { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { margin: .2rem 0 .6rem; padding: .3rem .6rem; background: #8881; white-space: pre-wrap; }
pre b { background: #ffc10759; font-weight: inherit; }
polyline { fill: none; stroke: #1976d2; stroke-width: 1.5; }
.grows polyline { stroke: #d32f2f; }
"""

_SCRIPT = """
"use strict";
const body = document.querySelector("tbody");
for (const head of document.querySelectorAll("th[data-sorts]")) {
  head.querySelector("button").addEventListener("click", () => {
    const numbers = head.dataset.sorts === "number", sorted = head.getAttribute("aria-sort");
    const down = numbers ? sorted !== "descending" : sorted === "ascending";
    for (const other of document.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.key;
    const compare = numbers ? (a, b) => key(a) - key(b)
      : (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0);
    const rows = [...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
    body.append(...rows);
  });
}
const box = document.querySelector("#freed");
if (box) {
  const show = () => document.body.classList.toggle("hide-freed", !box.checked);
  box.addEventListener("change", show);
  show();
}
"""

_COLUMNS = (
    ("kind", "text"),
    ("tick", "text"),
    ("alive", "number"),
    ("bytes", "number"),
    ("a tick", "number"),
    ("ever", "number"),
    ("bytes ever", "number"),
    ("stale uses", "number"),
    ("alive for, s", "number"),
    ("ticks", "number"),
)


def page(shown: EscapeMap) -> str:
    """The whole page. All that comes from the program is escaped, and no other script may run."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = "What changed" if shown.changes else "What escapes"
    taken = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(shown.taken))
    heads = "".join(
        f'<th scope="col" data-sorts="{sorts}"><button type="button">{name}</button></th>'
        for name, sorts in _COLUMNS
    )
    freed = sum(row._hidden for row in shown)
    toggle = (
        f'<label><input type="checkbox" id="freed"> show {freed:,} freed rows</label>'
        if freed
        else ""
    )
    rows = "\n".join(map(_row, shown))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<title>arena: {title.lower()}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{_safe(headline(shown))}</p>
<p>{taken}, tick-arena {__version__} {toggle}</p>
<table>
<thead><tr>{heads}<th scope="col">bytes over ticks</th><th scope="col">where</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _safe(odd: str) -> str:
    return escape(clean(odd, _LONG))


def _row(row: Escape) -> str:
    kind = "grows" if row.growing else "freed" if row._hidden else "stays"
    tick = "" if row.tick is None else row.tick
    number = '<td class="number" data-key="{}">{}</td>'.format
    return "".join(
        (
            f'<tr class="{kind}">',
            f'<td data-key="{row.kind}">{row.kind}</td>',
            f'<td data-key="{_safe(tick)}">{_safe(tick)}</td>',
            number(row.count, f"{row.count:,}"),
            number(row.bytes, size(row.bytes)),
            number(row.slope if row.growing else 0, size(row.slope, "+") if row.growing else ""),
            number(row.count_ever, f"{row.count_ever:,}"),
            number(row.bytes_ever, size(row.bytes_ever)),
            number(row.uses, f"{row.uses:,}"),
            number(row.age, f"{row.age:,.1f}"),
            number(row.last, f"{row.first:,} to {row.last:,}"),
            f"<td>{_curve(row.history)}</td>",
            f"<td>{''.join(_where(row))}</td></tr>",
        )
    )


def _curve(history: History) -> str:
    """The low-water marks over turns: a step for each stretch, from zero up."""
    if len(history) < 2:
        return ""
    start, end = history[0][0], history[-1][0]
    across = _WIDTH / max(1, end - start)
    up = (_HEIGHT - 4) / max(1, *(size for _, size in history))
    points = []
    height = None
    for turn, live in history:
        x = (turn - start) * across
        if height is not None:
            points.append(f"{x:.1f},{height:.1f}")
        height = _HEIGHT - 2 - live * up
        points.append(f"{x:.1f},{height:.1f}")
    told = f"{history[0][1]:,} bytes at turn {start:,}, {history[-1][1]:,} at turn {end:,}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'<title>{told}</title><polyline points="{" ".join(points)}"/></svg>'
    )


def _where(row: Escape) -> Iterator[str]:
    if not row.site:
        yield "place unknown"
    for number, frame in enumerate(row.site):
        yield from _frame(frame, "" if number == 0 else "from ", shut=number > 0)
    for number, frame in enumerate(row.used):
        yield from _frame(frame, "from " if number else "last used when stale: ", shut=number > 0)
    if row.example:
        yield f"<div>such as <code>{_safe(row.example)}</code></div>"


def _frame(frame: Frame, before: str, *, shut: bool) -> Iterator[str]:
    line = f'{before}<code title="{_safe(frame.file)}">{escape(place(frame))}</code>'
    lines = source(frame, _AROUND)
    if not lines:
        yield f"<div>{line}</div>"
        return
    yield f"<details{'' if shut else ' open'}><summary>{line}</summary><pre>"
    for number, text in lines:
        numbered = f"{number:5}  {_safe(text.expandtabs())}"
        yield (f"<b>{numbered}</b>" if number == frame.line else numbered) + "\n"
    yield "</pre></details>"
