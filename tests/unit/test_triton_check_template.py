"""`check` on a repository that upstream's template tool has filled in part: what it leaves is found, line by line.

The files have the form of upstream's templates (all_models/inflight_batcher_llm), cut to what matters here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.triton.check import check
from pipeline.triton.check_load import Finding
from tests.support.checkpoints import tiny_tokenizer
from tests.support.gpu_engine import llama_8b_fp8

pytestmark = pytest.mark.fast

CORE = """\
# Copyright. Fill ${triton_backend} and the others.
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy {
  decoupled: ${decoupled_mode}
}
dynamic_batching {
    preferred_batch_size: [ ${triton_max_batch_size} ]
    max_queue_delay_microseconds: 0
}
input [
  {
    name: "input_ids"
    data_type: TYPE_INT32
    dims: [ -1 ]
    allow_ragged_batch: true
    optional: true
  },
  {
    name: "draft_logits"
    data_type: ${logits_datatype}
    dims: [ -1, -1 ]
    optional: true
  }
]
output [
  {
    name: "output_ids"
    data_type: TYPE_INT32
    dims: [ -1, -1 ]
  }
]
instance_group [ { count: 1 kind : KIND_CPU } ]
parameters: {
  key: "gpt_model_type"
  value: { string_value: "inflight_fused_batching" }
}
parameters: {
  key: "gpt_model_path"
  value: { string_value: "ENGINE" }
}
parameters: {
  key: "max_beam_width"
  value: { string_value: "${max_beam_width}" }
}
parameters: {
  key: "tokenizer_dir"
  value: { string_value: "${tokenizer_dir}" }
}
parameters: {
  key: "guided_decoding_backend"
  value: { string_value: "${guided_decoding_backend}" }
}
parameters: {
  key: "xgrammar_tokenizer_info_path"
  value: { string_value: "${xgrammar_tokenizer_info_path}" }
}
"""
PREPROCESSING = """\
name: "preprocessing"
backend: "python"
max_batch_size: 64
input [ { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "INPUT_ID" data_type: TYPE_INT32 dims: [ -1 ] } ]
parameters { key: "tokenizer_dir" value: { string_value: "TOKENIZER" } }
instance_group [ { count: ${preprocessing_instance_count} kind: KIND_CPU } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A half-filled repository beside its engine."""
    engine = llama_8b_fp8(tmp_path / "engine")
    tiny_tokenizer(tmp_path / "tokenizer")
    texts = {
        "tensorrt_llm": CORE.replace("ENGINE", str(engine / "engine")),
        "preprocessing": PREPROCESSING.replace("TOKENIZER", str(tmp_path / "tokenizer")),
    }
    for model, text in texts.items():
        (tmp_path / "repository" / model / "1").mkdir(parents=True)
        (tmp_path / "repository" / model / "config.pbtxt").write_text(text)
    return tmp_path / "repository"


def rows(repository: Path) -> list[tuple[str, str, str]]:
    """Severity, place and message of every TL39."""
    findings = [finding for finding in check(repository) if isinstance(finding, Finding)]
    assert {finding.id for finding in findings} == {"TL39"}
    return [(finding.severity, finding.where, finding.message.split("'")[1]) for finding in findings]


def test_placeholders_in_the_grammar_are_errors_with_their_lines(repository: Path) -> None:
    """Each one, twice on two lines, none in a comment; the rest of the file is checked all the same."""
    errors = {row[1:] for row in rows(repository) if row[0] == "error"}
    variables = ("${triton_max_batch_size}", "${decoupled_mode}", "${logits_datatype}")
    assert errors == {("preprocessing/config.pbtxt:7", "${preprocessing_instance_count}")} | {
        (f"tensorrt_llm/config.pbtxt:{number}", variable)
        for number, line in enumerate(CORE.splitlines(), 1)
        for variable in variables
        if variable in line
    }
    assert len(errors) == 5


def test_unfilled_optional_parameter_is_a_warning(repository: Path) -> None:
    """The backend takes its default; the three keys that may be empty are not mentioned."""
    line = CORE.splitlines().index('  key: "max_beam_width"') + 1
    assert [row[1:] for row in rows(repository) if row[0] == "warning"] == [
        (f"tensorrt_llm/config.pbtxt:{line}", "max_beam_width")
    ]


def test_other_problems_of_a_half_filled_file_are_found_too(repository: Path) -> None:
    """A stand-in for a placeholder lets the checks behind the parser run."""
    path = repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("inflight_fused_batching", "V1").replace('/engine"', '/gone"'))
    ids = {finding.id for finding in check(repository) if isinstance(finding, Finding)}
    assert {"TL39", "TL57", "TL41"} <= ids
