"""Failure logs explained: each symptom of the table in a log of its own, order, absence, and bounded memory."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.keys import KEYS
from pipeline.errors import Unreadable
from pipeline.explain.explain import MAX_LINE_CHARS, UNKNOWN, Explanation, explain, likely_cause, read_lines, symptoms

pytestmark = pytest.mark.fast

LOGS = Path(__file__).resolve().parents[1] / "support" / "logs"
EVIDENCE: dict[str, int] = tomllib.loads((LOGS / "evidence.toml").read_text())

# Known failures that leave no line in a log, and what notices them instead.
SILENT = {
    "TL17": "answers degrade; the exported config is compared with the source",
    "TL33": "options are reset quietly; the engine's config.json is read back",
    "TL40": "values are cut by the template tool; the repository check reads them",
    "TL55": "a flag is ignored; the repository check compares it",
    "TL62": "a limit differs; the repository check compares it",
    "TL69": "the program prints nothing",
    "MO4": "answers degrade; the exported config is compared with the source",
    "MO6": "a scale is 1.0 by design",
    "MO7": "KV quantization is missing; the export check compares it with the request",
    "MO15": "weights are wrong; the verifier computes them",
    "MO16": "nothing was quantized; the export check counts",
    "MO18": "a file of another kind; only the two exporters are used",
    "MO21": "remote code changed; its revision is pinned",
    "MO22": "a model without a head; architectures are an allow-list",
    "MO23": "state is not restored; trtpipe restores none",
    "MO24": "a wildcard excludes all; config rules refuse it",
    "MO25": "names of another engine's loader",
    "MO27": "quality; the verifier judges it",
    "MO33": "a second export is wrong; one export per process",
    "MO34": "a digest differs; the list is sorted",
    "MO35": "sizes differ; read from the exported config",
    "MO37": "a reading of dtypes",
}


def first_telling(explanations: list[Explanation]) -> Explanation:
    """The first entry that a row of the table made."""
    return next(each for each in explanations if each.kind != "unknown")


@pytest.mark.parametrize("name", EVIDENCE)
def test_each_symptom_is_the_first_that_its_log_shows(name: str) -> None:
    """The row that the log is named after comes first, with the line that a person marked."""
    path = LOGS / f"{name}.log"
    found = first_telling(explain(read_lines(path)))
    assert (found.id, found.line_number) == (name, EVIDENCE[name])
    assert found.evidence == path.read_text().splitlines()[EVIDENCE[name] - 1].strip()


def test_every_row_has_a_log() -> None:
    """No row of the table is without a log, and no log without a row."""
    rows = {row.id for row in symptoms()}
    assert len(rows) == len(symptoms()) == 95
    assert rows == EVIDENCE.keys() == {path.stem for path in LOGS.glob("*.log")}


def test_every_known_failure_has_a_row_or_a_reason() -> None:
    """The 69 failures of TensorRT-LLM and the 37 of ModelOpt are in the table, or leave no line in a log."""
    known = {f"TL{n}" for n in range(1, 70)} | {f"MO{n}" for n in range(1, 38)}
    rows = {name for row in symptoms() for name in (row.id, *row.also)}
    assert known - rows == SILENT.keys()


def test_named_keys_are_keys_of_the_config() -> None:
    """A row sends nobody to a key that does not exist."""
    sections = {path.rpartition(".")[0] for path in KEYS}
    named = [row.key for row in symptoms() if row.key]
    assert len(named) > 40
    assert [key for key in named if key not in KEYS and key not in sections] == []


def test_keys_in_next_steps_are_keys_of_the_config() -> None:
    """A key path written in the text of a next step exists."""
    sections = {path.rpartition(".")[0] for path in KEYS}
    pattern = re.compile(r"\b(?:source|quantization|calibration|verify|engine|serving)\.[a-z_0-9]+(?:\.[a-z_0-9]+)*")
    written = [path for row in symptoms() for path in pattern.findall(row.next)]
    assert len(written) > 60
    assert [path for path in written if path not in KEYS and path not in sections] == []


def test_texts_of_the_gate_are_lower_case() -> None:
    """The gate compares with lower-cased lines, so an upper-case text would never be found."""
    assert [text for row in symptoms() for text in row.contains if text != text.lower()] == []


def test_facts_of_the_line_are_in_the_answer() -> None:
    """What a line says (sizes, names) is repeated in the cause."""
    found = explain(
        ["NotImplementedError: Weight shape 2752 of each TP tp=4 is not divisible for block size 128 for x"]
    )
    assert "over 4 GPUs a layer has 2752 inputs" in found[0].cause
    assert "groups of 128" in found[0].cause


def test_memory_error_comes_before_the_kill_that_follows() -> None:
    """A kill is a consequence, wherever it stands."""
    log = [
        "build.sh: line 3: 12 Killed  trtllm-build",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1",
    ]
    assert [each.id for each in explain(log)] == ["TL24", "host-kill"]


def test_kill_comes_before_the_harmless_warning_above_it() -> None:
    """The timing cache is blamed by readers and is not the cause."""
    assert [each.id for each in explain(read_lines(LOGS / "host-kill.log"))] == ["host-kill", "TL8"]


def test_causes_stand_in_the_order_of_the_log() -> None:
    """The earliest cause is told first."""
    log = ["KeyError: 'architecture'", "ModuleNotFoundError: No module named 'requests'"]
    assert [each.id for each in explain(log)] == ["TL25", "MO32"]
    assert [each.id for each in explain(reversed(log))] == ["MO32", "TL25"]


def test_repeated_symptom_is_told_once_with_its_first_line() -> None:
    """A line that comes back a thousand times is one symptom."""
    found = explain(["fine", *["[E] Logits type is not supported"] * 1000])
    assert [(each.id, each.line_number) for each in found] == [("TL68", 2)]


@pytest.mark.parametrize(
    "line",
    [
        "[TensorRT-LLM][INFO] TRTGptModel maxInputLen: 1023 = min(maxSequenceLen - 1, maxNumTokens) since context FMHA",
        "Traceback times: 137 ms for 137 requests",
        "I1130 server.cc:321] 'Timeout 30: Found 0 model versions that have in-flight inferences'",
        "[TRT-LLM] [W] Implicitly setting LLaMAConfig.producer = {'name': 'modelopt', 'version': '0.47.0'}",
        "0 errors, no failures",
        "layer.fake_quant_error median 2.27e-07",
    ],
)
def test_lines_of_healthy_logs_are_not_explained(line: str) -> None:
    """What every good run prints is no symptom."""
    (found,) = explain([line])
    assert (found.id, found.other_lines) == (UNKNOWN, ())


def test_healthy_start_without_a_gpu_names_no_cause() -> None:
    """CUDA warnings of a CPU server are told as harmless, and not counted as errors."""
    log = (LOGS / "cpu-only-triton.log").read_text().splitlines()
    assert [(each.id, each.kind) for each in explain(log)] == [(UNKNOWN, "unknown"), ("cpu-only-triton", "harmless")]
    assert explain(log)[0].other_lines == ()


def test_unknown_failure_shows_the_last_lines_that_look_like_errors() -> None:
    """Without a known symptom the answer says so, and shows five lines with their numbers."""
    log = [line for n in range(9) for line in (f"step {n} is done", f"FooError: gear {n} broke")]
    (found,) = explain(log)
    assert found.cause.startswith("No known symptom")
    assert found.other_lines == tuple((2 * n + 2, f"FooError: gear {n} broke") for n in range(4, 9))
    assert (found.evidence, found.line_number) == ("FooError: gear 8 broke", 18)


@pytest.mark.parametrize("log", [[], ["all is well"] * 3])
def test_log_without_errors_says_so(log: list[str]) -> None:
    """Nothing is made up for an empty or a quiet log."""
    (found,) = explain(log)
    assert (found.id, found.evidence, found.line_number) == (UNKNOWN, "", 0)
    assert f"none of the {len(log)} lines" in found.cause


def test_likely_cause_is_one_text_or_nothing() -> None:
    """A caller that adds the cause to its own error gets cause and next step, or an empty text."""
    assert likely_cause(["KeyError: 'architecture'"]).startswith("--checkpoint_dir points to a Hugging Face directory")
    assert likely_cause(read_lines(LOGS / "cpu-only-triton.log")) == ""


def test_colours_do_not_hide_a_symptom() -> None:
    """Escape sequences of a terminal are taken out first."""
    found = explain(["\x1b[1;31mKeyError: \x1b[0m'architecture'\x1b[K"])
    assert (found[0].id, found[0].evidence) == ("TL25", "KeyError: 'architecture'")


def test_memory_is_bounded_on_a_stream_without_end() -> None:
    """Lines are read once and dropped: what is kept does not grow with the log."""
    alive = 0
    most = 0

    class Line(str):
        """A line that counts how many of its kind exist."""

        __slots__ = ()

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def stream() -> Iterator[str]:
        nonlocal alive, most
        for n in range(2000):
            alive += 1
            most = max(most, alive)
            yield Line(f"SomeError: {n} " + "x" * 2 * MAX_LINE_CHARS)

    (found,) = explain(stream())
    assert most <= 2
    assert len(found.evidence) <= MAX_LINE_CHARS


def test_reading_survives_bytes_that_are_no_text_and_lines_without_end(tmp_path: Path) -> None:
    """A binary piece in a log becomes replacement characters, an endless line comes in pieces."""
    path = tmp_path / "x.log"
    path.write_bytes(b"\xff\xfe broken\n" + b"y" * 200_000 + b"\nKeyError: 'architecture'\n")
    pieces = list(read_lines(path))
    assert max(len(piece) for piece in pieces) <= 2**16
    assert explain(pieces)[0].id == "TL25"


def test_progress_bar_does_not_swallow_the_error_behind_it(tmp_path: Path) -> None:
    """A carriage return ends a line."""
    path = tmp_path / "x.log"
    path.write_bytes(b"10%\r" * 5000 + b"KeyError: 'architecture'\r\n")
    assert explain(read_lines(path))[0].id == "TL25"


def test_log_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """A missing file is an error of its own, not an empty log."""
    with pytest.raises(Unreadable, match=r"none\.log cannot be read: No such file"):
        list(read_lines(tmp_path / "none.log"))
