"""Laws between keys: each breach is named at the key to blame, with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.errors import ConfigError

pytestmark = pytest.mark.fast

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def problems(tmp_path: Path, *lines: str) -> list[str]:
    """The problems of a config as 'line key: message', without the file's name."""
    path = tmp_path / "x.yaml"
    path.write_text("name: a\n" + "\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    return [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{trust_remote_code: true}", "2 source: names no checkpoint. Write one of path"),
        ("{path: a, gguf: b.gguf}", "2 source.gguf: more than one source is named: 'path', 'gguf'."),
        ("{package: p}", "2 source.package: a package needs 'file'"),
        ("{path: a, file: f}", "2 source.file: 'f' is a path inside a package, and no package is named."),
        ("{package: p, file: ../f}", "2 source.file: '../f' leaves the package."),
        ("{package: p, file: /f}", "2 source.file: '/f' leaves the package."),
        (f"{{path: a, revision: {COMMIT}}}", "2 source.revision: a revision belongs to a hub id"),
        ("{hub: o/n, revision: main}", "2 source.revision: 'main' is not a commit"),
        ("{hub: o/n}", "2 source.hub: 'o/n' is not pinned"),
        (f"{{hub: ./a, revision: {COMMIT}}}", "2 source.hub: './a' is not a hub id. Write path for a directory."),
        (f"{{hub: a/b/c.gguf, revision: {COMMIT}}}", "is not a hub id. Write gguf for a GGUF file."),
        (f"{{hub: 'https://huggingface.co/o/n', revision: {COMMIT}}}", "Write hub: o/n."),
    ],
)
def test_a_source_names_exactly_one_pinned_checkpoint(tmp_path: Path, source: str, expected: str) -> None:
    """Anything that is not exactly one, pinned checkpoint is refused."""
    (found,) = problems(tmp_path, f"source: {source}")
    assert expected in found


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("{weight: 2}", "item 1 needs exactly one of path and hub."),
        (f"{{path: a, hub: o/n, revision: {COMMIT}, file: a}}", "item 1 needs exactly one of path and hub."),
        ("{path: a.jsonl, file: b}", "item 1 has a path; revision and file belong to a hub id."),
        (f"{{hub: o/n, revision: {COMMIT}}}", "item 1 needs 'file'"),
        (f"{{hub: o/n, revision: {COMMIT}, file: ../a}}", "item 1 needs 'file'"),
        ("{hub: o/n, file: a.jsonl, revision: main}", "o/n is not pinned"),
        ("{hub: ./n, file: a.jsonl}", "'./n' is not a hub id."),
        ("{path: a.jsonl, weight: 0}", "0 is not a number above 0."),
    ],
)
def test_a_calibration_set_names_one_file_and_is_pinned(tmp_path: Path, item: str, expected: str) -> None:
    """Each item is a file, or a file of a data set at a commit."""
    (found,) = problems(tmp_path, f"source: {{path: a}}\ncalibration:\n  datasets: [{item}]")
    assert expected in found
    assert "calibration.datasets" in found


def test_the_calibration_text_is_named_once(tmp_path: Path) -> None:
    """The short and the long form together are ambiguous."""
    text = "source: {path: a}\ncalibration: {dataset: a.jsonl, datasets: [{path: b.jsonl}]}"
    (found,) = problems(tmp_path, text)
    assert "the text is named twice" in found


@pytest.mark.parametrize(
    "source",
    ["{path: a}", "{gguf: a.gguf}", "{package: p, file: m/f.gguf}", f"{{hub: gpt2, revision: {COMMIT}}}"],
)
def test_each_kind_of_source_is_accepted(tmp_path: Path, source: str) -> None:
    """The four kinds load."""
    path = tmp_path / "x.yaml"
    path.write_text(f"name: a\nsource: {source}\n")
    assert load(path).config.name == "a"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "engine: {max_num_tokens: 8, max_batch_size: 16}",
            "3 engine.max_num_tokens: 8 tokens per iteration cannot hold one token of each of 16 sequences",
        ),
        (
            "engine: {max_num_tokens: 512, max_seq_len: 1024, enable_chunked_context: false}",
            (
                "3 engine.max_num_tokens: without chunked context a prompt must fit into one iteration: 512 tokens "
                "< max_seq_len 1024. Raise it to 1024, or set enable_chunked_context: true."
            ),
        ),
        (
            "engine: {max_seq_len: 256}",
            "serving.default_max_tokens: an answer of 256 tokens leaves no room for a prompt",
        ),
        ("engine: {target: tensorrt_llm}", "3 engine.gpu: a TensorRT-LLM engine runs on one GPU model only"),
        (
            "quantization: {format: fp16}",
            "engine.dtype: format fp16 is float16, and engine.dtype is bfloat16. Set engine.dtype: float16",
        ),
        (
            "quantization: {format: fp8, exclude: ['*']}",
            "3 quantization.exclude: '*' excludes every layer, so nothing is left to quantize.",
        ),
        ("quantization: {format: fp8, exclude: ['']}", "3 quantization.exclude: an empty glob matches no module."),
        ("finetune: {method: qad}", "3 finetune.method: nothing is rounded in format bf16 and nothing is sparse"),
        (
            "quantization: {format: int8_wo}\nfinetune: {method: qat, steps: 5}",
            "finetune.warmup_steps: 5 steps of warm-up leave none of 5",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(tmp_path: Path, lines: str, expected: str) -> None:
    """Each law names the key to blame and the numbers."""
    (found,) = problems(tmp_path, "source: {path: m}", lines)
    assert expected in found


def test_settings_without_effect_are_warnings_and_not_errors(tmp_path: Path) -> None:
    """A CPU build of a GPU config loads, and says what it ignores."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: a\nsource: {path: m}\nengine: {gpu: H100}\nquantization: {group_size: 64, smoothquant_alpha: 0.7}\n"
    )
    loaded = load(path)
    assert [(problem.severity, problem.where.removeprefix(f"{path}:")) for problem in loaded.warnings] == [
        ("warning", "4 quantization.group_size"),
        ("warning", "4 quantization.smoothquant_alpha"),
        ("warning", "3 engine.gpu"),
    ]
    assert "has no effect with format bf16" in str(loaded.warnings[0])
