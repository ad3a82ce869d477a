"""What a person sees while an evaluation runs."""

from __future__ import annotations

import io
import time

from tiderl.env.ends import EndReason
from tiderl.evaluation.progress import Live, Plain, Tally, reporter_for
from tiderl.evaluation.result import EpisodeResult


def record(index: int, end: EndReason = EndReason.SUCCESS) -> EpisodeResult:
    return EpisodeResult(index, None, 0, end, end is EndReason.SUCCESS, 1.0, model_calls=1)


def test_tally_counts_what_is_new_apart() -> None:
    tally = Tally(total=10, began=100.0)
    tally.add(record(0), fresh=False)
    tally.add(record(1), fresh=False)
    assert tally.left(110.0) is None
    tally.add(record(2))
    tally.add(record(3, EndReason.INFRASTRUCTURE))
    assert (tally.done, tally.fresh, tally.valid, tally.successes, tally.invalid) == (4, 2, 3, 3, 1)
    assert tally.rate(110.0) == 0.2
    assert tally.left(110.0) == 30.0
    assert tally.text(110.0) == "success 1.000 · 1 invalid · 0.2 episodes/s · 0:30 left"


def test_plain_lines_hold_no_control_characters_and_are_few() -> None:
    stream = io.StringIO()
    plain = Plain(stream, every=0.05)
    tally = Tally(total=200, began=time.monotonic())
    plain.stage("starting")
    plain.start(tally)
    for i in range(200):
        tally.add(record(i))
        plain.episode(record(i), tally)
    time.sleep(0.06)
    plain.episode(record(199), tally)
    plain.stop()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["starting", "200 episodes"]
    assert 3 <= len(lines) <= 8
    assert lines[-1].startswith("200/200 · success 1.000")
    assert all(ch.isprintable() or ch == "\n" for ch in stream.getvalue())


def test_the_stream_decides() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(reporter_for("x", io.StringIO()), Plain)
    assert isinstance(reporter_for("x", Terminal()), Live)


def test_live_bar_runs_through() -> None:
    live = Live("demo")
    tally = Tally(total=2, began=time.monotonic())
    live.stage("starting the engine")
    live.start(tally)
    for i in range(2):
        tally.add(record(i))
        live.episode(record(i), tally)
    live.stop()
    live.stop()
