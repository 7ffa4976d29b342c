"""Quality gate, fallback and ladder through the real command line, on a tiny random Llama."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.support import foreign
from tests.support.checkpoints import tiny_llama
from tests.support.commands import trtpipe, write_config

pytestmark = pytest.mark.heavy

# On this model INT4 weights give a KL of some 7e-4 nats, 16 bit gives none.
STRICT = """\
quality:
  max_kl: 0.0001
  num_tokens: 2048
"""
STEPS = """\
fallback:
  - quantization: {format: bf16}
  - quantization: {format: int8_sq}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny checkpoint and a config: INT4 first, which the gate refuses, then others."""
    directory = tmp_path_factory.mktemp("ladder")
    config = write_config(directory, tiny_llama(directory / "checkpoint"))
    config.write_text(config.read_text() + STRICT + STEPS)
    return directory


def test_build_takes_the_first_step_that_passes_and_records_the_rejected_one(project: Path) -> None:
    """The repository is of the second step, and says why the first was not taken, with numbers."""
    document = trtpipe("build", "tiny.yaml", "--json", cwd=project).document
    assert document["format"] == "bf16"
    assert set(document["stages"]) == {"quantize", "verify", "gate", "compile", "emit"}
    recorded = json.loads((project / "build" / "tiny" / "quality.json").read_text())
    assert recorded == document["quality"]
    assert recorded["verdict"] == "pass"
    (rejected,) = recorded["rejected"]
    assert (rejected["format"], rejected["verdict"]) == ("int4_awq", "fail")
    (kl,) = [measure for measure in rejected["measures"] if measure["metric"] == "kl_nats"]
    assert kl["low"] > kl["limit"] == 0.0001
    manifest = json.loads((project / "build" / "tiny" / "manifest.json").read_text())
    assert "quality.json" in manifest["files"]
    trtpipe("check", "build/tiny", cwd=project)


def test_a_second_build_reuses_every_step_of_the_ladder(project: Path) -> None:
    """Rejected and chosen alike come from the store, and the same bytes come out."""
    first = trtpipe("build", "tiny.yaml", "--json", cwd=project).document
    again = trtpipe("build", "tiny.yaml", "--json", cwd=project)
    assert {stage["hit"] for stage in again.document["stages"].values()} == {True}
    assert again.document["stages"]["emit"]["digest"] == first["stages"]["emit"]["digest"]
    assert "calibrate" not in again.stderr


def test_the_ladder_compares_every_step(project: Path) -> None:
    """Size, speed and quality of all three, whatever a build would take; the chosen one is marked."""
    short = ("--repeats", "2", "--concurrency", "3")
    document = trtpipe("ladder", "tiny.yaml", "--json", *short, cwd=project).document
    assert [step["label"] for step in document["steps"]] == ["int4_awq", "bf16", "int8_sq"]
    assert document["chosen"] == 1
    int4, bf16, int8 = document["steps"]
    assert int4["checkpoint_bytes"] < int8["checkpoint_bytes"] < bf16["checkpoint_bytes"]
    assert all(step["blocks"] == 32 for step in document["steps"])
    for step in document["steps"]:
        alone, together = step["speed"]["loads"]
        assert (alone["requests"], together["requests"]) == (1, 3)
        for metric in ("ttft_ms", "decode_tokens_per_s"):
            spread = together[metric]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert document["machine"]["usable_cores"] >= 1
    table = trtpipe("ladder", "tiny.yaml", "--no-speed", cwd=project).stdout
    assert any(line.startswith("→") and " bf16 " in line and line.endswith("pass") for line in table.splitlines())
    assert "tok/s" not in table


def test_plan_tells_how_far_every_step_is_known(project: Path, tmp_path: Path) -> None:
    """What a build takes and why, sizes as built or as estimated, and what the store has of each step."""
    trtpipe("build", "tiny.yaml", cwd=project)
    document = trtpipe("plan", "tiny.yaml", "--json", cwd=project).document
    known = [(step["label"], step["fate"], step["verdict"], step["estimated"]) for step in document["ladder"][:2]]
    assert known == [("int4_awq", "rejected", "fail", False), ("bf16", "taken", "pass", False)]
    assert document["ladder"][2]["fate"] == "unreached"
    assert {stage["status"] for stage in document["ladder"][1]["stages"]} == {"hit"}
    assert [stage["name"] for stage in document["ladder"][0]["stages"]] == ["calibrate", "quantize", "verify"]
    table = trtpipe("plan", "tiny.yaml", "--store", tmp_path / "new", cwd=project).stdout
    (line,) = [line for line in table.splitlines() if line.startswith("int8_sq")]
    assert "about " in line
    assert "open" in line
    assert "miss, " in line
    assert "verify unknown" in line


def test_the_speed_of_a_gpu_target_is_not_run_here(project: Path, tmp_path: Path) -> None:
    """Quality is measured, and no time is made up."""
    config = tmp_path / "gpu.yaml"
    lines = (f"extends: {project / 'tiny.yaml'}", "quantization: {format: bf16}", "fallback: []")
    config.write_text("\n".join((*lines, "engine: {target: tensorrt_llm, gpu: H100}")) + "\n")
    (step,) = trtpipe("ladder", config, "--json", cwd=tmp_path).document["steps"]
    assert list(step["speed"]) == ["not_run"]
    assert "this is tensorrt_llm" in step["speed"]["not_run"]
    assert step["verdict"] == "pass"


def test_a_gate_without_fallback_stops_the_build(project: Path, tmp_path: Path) -> None:
    """Exit code 10, and nothing is compiled."""
    config = tmp_path / "alone.yaml"
    config.write_text(f"extends: {project / 'tiny.yaml'}\nfallback: []\n")
    store = ("--store", project / ".trtpipe")
    outcome = trtpipe("build", config, *store, cwd=tmp_path, code=10)
    assert "gate: the checkpoint does not pass its quality gate" in outcome.stderr
    assert "kl_nats" in outcome.stderr
    assert not (tmp_path / "build").exists()


def test_a_measurement_that_cannot_tell_is_its_own_outcome(project: Path, tmp_path: Path) -> None:
    """Exit code 9 for a limit inside the interval; accepted when the config says so."""
    step = trtpipe("ladder", "tiny.yaml", "--json", "--no-speed", cwd=project).document["steps"][0]
    (kl,) = [measure["estimate"] for measure in step["measures"] if measure["metric"] == "kl_nats"]
    config = tmp_path / "close.yaml"
    config.write_text(f"extends: {project / 'tiny.yaml'}\nquality: {{max_kl: {kl:.8f}}}\nfallback: []\n")
    store = ("--store", project / ".trtpipe", "--until", "gate")
    assert "cannot tell" in trtpipe("build", config, *store, cwd=tmp_path, code=9).stderr
    accepted = ("--set", "quality.inconclusive=accept", "--json")
    assert trtpipe("build", config, *store, *accepted, cwd=tmp_path).document["quality"]["verdict"] == "inconclusive"


def test_when_no_step_passes_every_one_is_named(project: Path, tmp_path: Path) -> None:
    """Both steps are listed with their numbers."""
    config = tmp_path / "none.yaml"
    config.write_text(f"extends: {project / 'tiny.yaml'}\nfallback:\n  - quantization: {{exclude: ['*.down_proj']}}\n")
    outcome = trtpipe("build", config, "--store", project / ".trtpipe", cwd=tmp_path, code=10)
    assert "none of 2 steps passes the quality gate" in outcome.stderr
    assert all(name in outcome.stderr.split("none of 2")[1] for name in ("int4_awq:", "exclude=*.down_proj", "kl_nats"))


def test_tasks_are_answered_by_both_models(project: Path, tmp_path: Path) -> None:
    """A question that the source itself answers: the untouched 16-bit model answers it too."""
    rows = [{"prompt": f"The capital of {name} is", "answer": "e", "max_tokens": 24} for name in "abcdefghij"]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "tasks.yaml"
    quality = "quality: {tasks: [task.jsonl], max_task_drop: 0.9, num_tokens: 64}"
    config.write_text(f"extends: {project / 'tiny.yaml'}\n{quality}\nquantization: {{format: bf16}}\nfallback: []\n")
    store = ("--store", project / ".trtpipe")
    document = trtpipe("build", config, *store, "--until", "verify", "--json", cwd=tmp_path).document
    report = json.loads((Path(document["stages"]["verify"]["path"]) / "report.json").read_text())
    (task,) = report["tasks"]
    assert task["file"] == "task.jsonl"
    assert task["sha256"] == hashlib.sha256((tmp_path / "task.jsonl").read_bytes()).hexdigest()
    assert len(task["source"]) == 10
    assert task["source"] == task["quantized"]


def test_a_step_that_cannot_be_built_is_refused_before_anything_runs(project: Path, tmp_path: Path) -> None:
    """`config check` and `build` name the step's own line; nothing is quantized."""
    config = tmp_path / "impossible.yaml"
    config.write_text(f"extends: {project / 'tiny.yaml'}\nfallback:\n  - quantization: {{format: w4a8_awq}}\n")
    for command in (("config", "check"), ("build",)):
        outcome = trtpipe(*command, config, cwd=tmp_path, code=3)
        assert "step w4a8_awq: impossible.yaml:3 quantization.format: w4a8_awq" in outcome.stderr
    assert not list((tmp_path / ".trtpipe").rglob("quantization.json"))


def test_a_step_that_verify_refuses_is_refused_again_without_measuring(project: Path, tmp_path: Path) -> None:
    """Its failed checks are recorded; the second build reads them, and the stage itself ends as before."""
    config = tmp_path / "unproven.yaml"
    config.write_text(f"extends: {project / 'tiny.yaml'}\nverify: {{max_kl: 1.0e-9}}\nfallback: []\n")
    store = ("--store", project / ".trtpipe")
    first, again = (trtpipe("verify", config, *store, cwd=tmp_path, code=7).stderr for _ in range(2))
    assert "verify: running" in first
    assert "verify: running" not in again
    words = [text[text.index("error: verify: the int4_awq checkpoint does not") :] for text in (first, again)]
    assert words[0] == words[1]
    assert "model.mean_kl_nats" in words[0]
    config.write_text(config.read_text().replace("[]", "[{verify: {max_kl: 1.0}, quantization: {format: bf16}}]"))
    document = trtpipe("build", config, *store, "--json", cwd=tmp_path).document
    (rejected,) = document["rejected"]
    assert (rejected["verdict"], rejected["verification"]["failed"]) == ("unproven", 1)
    assert [check["name"] for check in rejected["verification"]["failed_checks"]] == ["model.mean_kl_nats"]
    assert rejected["checkpoint_bytes"] < document["quality"]["checkpoint_bytes"]
    assert document["quality"]["changes"] == {"quantization.format": "bf16", "verify.max_kl": "1.0"}


def test_a_step_without_anything_to_judge_by_does_not_end_the_ladder(project: Path, tmp_path: Path) -> None:
    """A source quantized elsewhere without a reference is named as such; the step that names one is judged."""
    made = foreign.quantize_checkpoint(
        project / "checkpoint",
        tmp_path / "gptq",
        foreign.GPTQ_CONFIG,
        lambda name, w: foreign.gptq(name, foreign.round_matrix(w, bits=4, group_size=64, symmetric=True)),
    )
    reference = f"verify: {{reference: {project / 'checkpoint'}}}"
    config = tmp_path / "foreign.yaml"
    lines = ["name: made", f"source: {{path: {made}}}", "quality: {max_kl: 1.0, num_tokens: 2048}"]
    lines += ["verify: {min_top1_agreement: 0.1}", "serving: {default_max_tokens: 32}", f"fallback: [{{{reference}}}]"]
    config.write_text("\n".join(lines) + "\n")
    document = trtpipe("build", config, "--json", "--until", "gate", cwd=tmp_path).document
    (rejected,) = document["rejected"]
    assert rejected["verdict"] == "unjudged"
    assert rejected["reasons"][0].startswith("cannot be judged: the verification report holds no scores")
    assert document["quality"]["verdict"] == "pass"
    config.write_text(config.read_text().replace(reference, "engine: {max_batch_size: 3}"))
    assert "has nothing to compare with" in trtpipe("build", config, cwd=tmp_path, code=3).stderr
