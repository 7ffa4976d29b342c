"""Speed of engines: what a sample says, and that engines are measured in turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.core.progress import Silent
from pipeline.host.cpu_time import busy_seconds
from pipeline.measure.speed import Load, Round, Sample, compare, fitting_loads, summarize

pytestmark = pytest.mark.fast

LOAD = Load(concurrency=1, requests=1, input_tokens=8, output_tokens=4)


def test_a_single_request_gives_its_first_token_and_its_gaps() -> None:
    """0.5 s to the first of five tokens, then one every 0.1 s."""
    sample = summarize([10.0], [[10.5, 10.6, 10.7, 10.8, 10.9]], seconds=1.0)
    assert (sample.ttft_ms, sample.itl_ms) == (500, 100)
    assert (sample.decode_tokens_per_s, sample.output_tokens_per_s) == (10, 5)


def test_requests_together_decode_from_the_earliest_first_token_to_the_last() -> None:
    """Four tokens after the firsts, in two seconds; the median request waited 1.5 s."""
    sample = summarize([0.0, 0.0], [[1.0, 2.0, 3.0], [2.0, 2.5, 3.0]], seconds=4.0)
    assert sample.ttft_ms == 1500
    assert sample.decode_tokens_per_s == 2
    assert sample.output_tokens_per_s == 1.5


class Clock:
    """Engines as fast as their names say, and the order in which they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def measure(self, engine: Path, loads: Sequence[Load], seed: int) -> Round:
        """Return the speed of the name plus the turn."""
        self.asked.append((engine.name, seed))
        value = float(engine.name) + seed
        sample = Sample(ttft_ms=value, itl_ms=value, decode_tokens_per_s=value, output_tokens_per_s=value)
        return Round(samples=(sample,) * len(loads), busy_elsewhere=None)


def test_engines_are_measured_in_turns_that_start_with_another_each_time() -> None:
    """So that a busy minute meets all of them; the prompts of a turn are the same for all."""
    clock = Clock()
    speeds = compare([Path("10"), Path("20"), Path("30")], [LOAD], 3, Silent(), clock.measure)
    assert [name for name, _ in clock.asked] == ["10", "20", "30", "20", "30", "10", "30", "10", "20"]
    assert [seed for _, seed in clock.asked] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [speed.document()["loads"][0]["ttft_ms"]["median"] for speed in speeds] == [11, 21, 31]


def test_the_document_holds_median_and_range_of_every_metric() -> None:
    """Beside the load that they belong to."""
    (speed,) = compare([Path("10")], [LOAD], 5, Silent(), Clock().measure)
    document = speed.document()
    assert document["repeats"] == 5
    (load,) = document["loads"]
    assert load["decode_tokens_per_s"] == {"median": 12, "low": 10, "high": 14}
    assert (load["requests"], load["input_tokens"], load["output_tokens"]) == (1, 8, 4)


def test_the_load_fits_the_smallest_engine(tmp_path: Path) -> None:
    """All engines get the same prompts, or their times would not compare."""
    for name, room in (("a", 4096), ("b", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.json").write_text(json.dumps({"limits": {"max_seq_len": room}}))
    one, many = fitting_loads([tmp_path / "a", tmp_path / "b"], (1, 8), input_tokens=128, output_tokens=32)
    assert (one.input_tokens, one.output_tokens) == (20, 20)
    assert (many.concurrency, many.requests) == (8, 8)
    assert fitting_loads([tmp_path / "a"], (1,), 128, 32)[0].input_tokens == 128


def test_busy_time_counts_neither_idle_nor_waiting(tmp_path: Path) -> None:
    """User, nice, system, interrupts and steal; guest time is in user time already."""
    (tmp_path / "stat").write_text("cpu  100 200 300 90000 80000 10 20 70 999 999\ncpu0 1 1 1 1\n")
    assert busy_seconds(tmp_path / "stat") == 7.0
    assert busy_seconds(tmp_path / "absent") is None
