"""What a server keeps of bodies that it has delivered, and who is left waiting.

An interception server stands between agents and a model: three protocols, streamed and not, each
body with the whole history and one more screenshot. Server, model and agents are processes on
loopback; the server's resident memory is read from outside, ten times a second. Now and then a
request fails: the model before the first byte, in the middle, after the answer; the client goes
away; the making of the stream raises; the rollout is cancelled. A handler that has not returned a
second after its request or rollout has ended counts as hung. "base" is before the first wave, after
a few small requests; "peak" is the most while it works, "resting" is some seconds after a wave, of
both the highest over the waves; "loop gap" is the worst lateness of a ticker in the server's event
loop; "cpu" is the server's. "at rest" is what the server itself says of its memory at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks._report import Options, Report


def run(options: Options, report: Report) -> None:
    """Run the variants one after the other, and report how they compare."""
    # Here and not above: the processes that are measured import this package, too.
    from benchmarks.churn.compare import compare

    compare(options, report)
