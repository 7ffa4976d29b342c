"""Loading a config: positions, merging, overrides, provenance, and a message for every mistake."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import pipeline.config
from pipeline.config.load import load
from pipeline.errors import ConfigError

pytestmark = pytest.mark.fast

MINIMAL = "name: a\nsource: {path: model}\n"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every test in its own directory, so that messages name relative files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "x.yaml") -> Path:
    """Write a config into the working directory."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def problems(text: str, *overrides: str) -> list[str]:
    """What load says about a config, one line per problem."""
    with pytest.raises(ConfigError) as caught:
        load(write(text), overrides)
    return [str(problem) for problem in caught.value.problems]


def test_defaults_fill_what_a_minimal_config_leaves_out() -> None:
    """Name and source are enough; everything else has a default."""
    loaded = load(write(MINIMAL))
    assert loaded.config.quantization.format == "bf16"
    assert loaded.config.engine.target == "openvino"
    assert loaded.warnings == ()


def test_provenance_names_the_line_of_each_value_and_default_for_the_rest() -> None:
    """Every value says where it comes from: a line, an override, or the default."""
    loaded = load(write(MINIMAL + "engine:\n  max_batch_size: 8\n"), ["calibration.seed=3"])
    assert loaded.provenance["engine.max_batch_size"] == "x.yaml:4"
    assert loaded.provenance["source.path"] == "x.yaml:2"
    assert loaded.provenance["calibration.seed"] == "--set"
    assert loaded.provenance["engine.max_num_tokens"] == "default"


def test_relative_paths_start_at_the_file_in_which_they_are_written(work: Path) -> None:
    """A fragment's path is relative to the fragment, an override's to the working directory."""
    write("calibration: {dataset: data.jsonl}\nsource: {path: model}\n", "units/base.yaml")
    path = write("extends: ../units/base.yaml\nname: a\nsource: {path: ../m}\n", "configs/x.yaml")
    config = load(path, ["verify.dataset=held.txt"]).config
    assert config.calibration.dataset == work / "units/data.jsonl"
    assert config.source.path == work / "m"
    assert config.verify.dataset == work / "held.txt"


def test_extends_merges_mappings_and_replaces_lists_and_values() -> None:
    """Parents are read in order, then the file itself: sections merge, values and lists replace."""
    write("quantization: {format: fp8, exclude: [lm_head, a]}\nengine: {max_batch_size: 1}\n", "one.yaml")
    write("engine: {max_batch_size: 2, max_num_tokens: 100}\n", "two.yaml")
    path = write("extends: [one.yaml, two.yaml]\n" + MINIMAL + "quantization: {exclude: [b]}\n")
    loaded = load(path)
    assert loaded.config.quantization.format == "fp8"
    assert loaded.config.quantization.exclude == ("b",)
    assert loaded.config.engine.max_batch_size == 2
    assert loaded.provenance["engine.max_num_tokens"] == "two.yaml:1"
    assert [file.name for file in loaded.files] == ["one.yaml", "two.yaml", "x.yaml"]


def test_parents_of_parents_are_read_first() -> None:
    """Merging is depth first: the nearest file wins."""
    write("engine: {max_batch_size: 1, max_num_tokens: 50}\n", "deep/grand.yaml")
    write("extends: deep/grand.yaml\nengine: {max_batch_size: 2}\n", "base.yaml")
    config = load(write("extends: base.yaml\n" + MINIMAL)).config
    assert (config.engine.max_batch_size, config.engine.max_num_tokens) == (2, 50)


def test_null_takes_an_inherited_value_back() -> None:
    """A child can return to 'nothing chosen'."""
    write("engine: {max_seq_len: 512}\nsource: {gguf: a.gguf}\n", "base.yaml")
    path = write("extends: base.yaml\nname: a\nsource: {gguf: null, path: m}\nengine: {max_seq_len: null}\n")
    loaded = load(path)
    assert loaded.config.engine.max_seq_len is None
    assert loaded.config.source.gguf is None


def test_an_empty_section_sets_nothing() -> None:
    """A section whose lines are all commented out is no mistake."""
    assert load(write(MINIMAL + "engine:\n  # max_batch_size: 4\n")).config.engine.max_batch_size == 64


def test_a_circle_of_extends_names_the_chain() -> None:
    """The message shows how the files came back to the first one."""
    write("extends: x.yaml\n", "b.yaml")
    assert problems("extends: b.yaml\n" + MINIMAL) == [
        "b.yaml:1 extends: 'extends' runs in a circle: 'x.yaml' -> 'b.yaml' -> 'x.yaml'. Remove one of the links."
    ]


def test_a_missing_parent_names_the_line_that_asks_for_it() -> None:
    """The place is the list item, and a similar file is proposed."""
    write("", "units/cpu.yaml")
    assert problems("name: a\nextends:\n  - units/cup.yaml\n") == [
        "x.yaml:3 extends: 'units/cup.yaml' does not exist. Did you mean 'units/cpu.yaml'?"
    ]


def test_extends_of_another_type_is_refused() -> None:
    """Only a file or a list of files can be extended."""
    assert problems("extends: {a: b}\n" + MINIMAL) == [
        "x.yaml:1 extends: 'extends' takes a file or a list of files. Write extends: base.yaml."
    ]


def test_a_missing_config_proposes_its_neighbour() -> None:
    """A misspelt file name is answered with the nearest one."""
    write(MINIMAL, "cfg/model.yaml")
    with pytest.raises(ConfigError) as caught:
        load(Path("cfg/modle.yaml"))
    assert [str(problem) for problem in caught.value.problems] == [
        "cfg/modle.yaml: 'cfg/modle.yaml' does not exist. Did you mean 'cfg/model.yaml'?"
    ]


def test_every_problem_is_reported_at_once_with_its_line() -> None:
    """Syntax is fine, eight things are wrong in three ways, and all are shown in order of lines."""
    text = """\
        nmae: b
        name: a
        source: {path: model}
        quantization:
          format: fp88
          group_size: 100
        engine:
          max_model_len: 4096
          max_batch_size: "64"
          max_num_tokens: 8k
          enable_chunked_context: yes
          target: tensorrt_llm
        """
    valid = "Valid: name, source, quantization, calibration, sparsity, finetune, verify, quality, engine, serving."
    assert problems(text) == [
        f"x.yaml:1 nmae: unknown key 'nmae'. Did you mean 'name'? {valid}",
        (
            "x.yaml:5 quantization.format: 'fp88' is not a format. Did you mean 'fp8'? "
            "Valid: bf16, fp16, fp8, fp8_rowwise, int8_sq, int4_awq, w4a8_awq, int8_wo, int4_wo, auto."
        ),
        "x.yaml:6 quantization.group_size: 100 is not a group size. The nearest is 128. Valid: 32, 64, 128.",
        (
            "x.yaml:7 engine.gpu: a TensorRT-LLM engine runs on one GPU model only, and none is named. "
            "Add gpu: one of H100, H200, A100, L40S, L4."
        ),
        "x.yaml:8 engine.max_model_len: unknown key 'max_model_len'. Here it is 'engine.max_seq_len'.",
        (
            "x.yaml:9 engine.max_batch_size: '64' is not a whole number of at least 1. "
            "Write the number alone: max_batch_size: 64."
        ),
        (
            "x.yaml:10 engine.max_num_tokens: '8k' is not a whole number of at least 1. "
            "Write the number in full: 8000 or 8192."
        ),
        "x.yaml:11 engine.enable_chunked_context: 'yes' is not true or false. Write true.",
    ]


def test_a_wrong_value_hides_the_laws_that_depend_on_it() -> None:
    """No consequential error: with a broken max_num_tokens nothing is said about its size."""
    found = problems(MINIMAL + "engine: {max_num_tokens: x, max_batch_size: 64, max_seq_len: 9}\n")
    assert [problem.split(": ")[0] for problem in found] == [
        "x.yaml:1 serving.default_max_tokens",
        "x.yaml:3 engine.max_num_tokens",
    ]


def test_problems_of_several_files_are_reported_together() -> None:
    """A parent's mistake is shown with the parent's line."""
    write("engine:\n  max_batch: 3\n", "base.yaml")
    found = problems("extends: base.yaml\n" + MINIMAL + "verify: {num_tokens: 1}\n")
    assert [problem.split(":", 2)[:2] for problem in found] == [
        ["base.yaml", "2 engine.max_batch"],
        ["x.yaml", "4 verify.num_tokens"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nname: b\nsource: {path: m}\n", "x.yaml:2 name: 'name' is written twice; first at x.yaml:1."),
        ("name: a\n  source: x\n", "x.yaml:2:9: invalid YAML: mapping values are not allowed here."),
        ("name: [a\n", "x.yaml:2:1: invalid YAML: expected ',' or ']', but got '<stream end>'."),
        ("name: a\n---\nname: b\n", "x.yaml:2:1: invalid YAML: but found another document."),
        ("- a\n", "x.yaml:1: a config is a mapping of keys, not a list."),
        ("", "x.yaml: the file is empty."),
        ("# only a comment\n", "x.yaml: the file is empty."),
        ("name: a\nsource: model\n", "x.yaml:2 source: 'source' is a section and takes keys, not 'model'."),
        (MINIMAL + "1: x\n", "x.yaml:3: a key must be a plain text."),
        (MINIMAL + "<<: {a: b}\n", "x.yaml:3: no merge key '<<' here."),
        (MINIMAL + "engine: {max_batch_size: [1]}\n", "takes a whole number of at least 1, not a list."),
        (MINIMAL + "engine: {max_batch_size: {a: 1}}\n", "takes a whole number of at least 1, not a mapping."),
        (MINIMAL + "engine: {max_batch_size: }\n", "is empty; it takes a whole number of at least 1."),
        (MINIMAL + "engine: {max_batch_size: 1.5}\n", "1.5 is not a whole number of at least 1."),
        (MINIMAL + "engine: {max_batch_size: .inf}\n", "inf is not a whole number of at least 1."),
        (MINIMAL + "verify: {max_kl: .nan}\n", "nan is not a number above 0."),
        (MINIMAL + "verify: {max_kl: !!python/name:os.system x}\n", "is not allowed. Write plain data without a tag."),
        (MINIMAL + 'serving: {max_queue_size: "\\ud800"}\n', "is not a YAML str."),
        (MINIMAL + "quantization: {exclude: lm_head}\n", 'Write exclude: ["lm_head"].'),
        (MINIMAL + "quantization: {exclude: [a, ~]}\n", "quantization.exclude: item 2 is empty."),
        (MINIMAL + "engine:\n\tmax_batch_size: 1\n", "x.yaml:4:1: invalid YAML: found character"),
        (MINIMAL + "quantization:\n  exclude: [*.mlp.down_proj]\n", "Quote globs"),
        ("name: Foo Bar\nsource: {path: m}\n", "x.yaml:1 name: 'Foo Bar' is not a valid name. Did you mean 'foo-bar'?"),
        ("source: {path: m}\n", "x.yaml:1 name: is required."),
        ("name: a\n", "x.yaml:1 source: is required."),
        (MINIMAL + "a: &x [*x]\n", "x.yaml:3 a: unknown key 'a'."),
        (MINIMAL + "engine: {extends: b.yaml}\n", "It stands at the top level of a file."),
        (MINIMAL + "extends: []\nextends: []\n", "'extends' is written twice; first at x.yaml:3."),
    ],
)
def test_a_malformed_config_is_refused_with_its_place(text: str, expected: str) -> None:
    """Each kind of mistake gets its own words and place."""
    found = problems(text)
    assert any(expected in problem for problem in found), found
    assert all(problem.startswith(("x.yaml", "--set")) for problem in found)


def test_a_file_that_is_not_text_is_refused() -> None:
    """Binary files, a GGUF for example, are named as such."""
    Path("x.yaml").write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(ConfigError, match=r"'x.yaml' is not UTF-8 text \(byte 4\)"):
        load(Path("x.yaml"))


def test_a_directory_is_not_a_config() -> None:
    """Pointing at the directory of configs says so."""
    Path("configs").mkdir()
    with pytest.raises(ConfigError, match="'configs' is a directory, not a YAML file"):
        load(Path("configs"))


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    """A thousand brackets do not reach Python's recursion limit unhandled."""
    assert problems("name: " + "[" * 5000) == ["x.yaml: the YAML is nested too deeply to be a config."]


def test_an_empty_parent_is_named_beside_other_problems() -> None:
    """Two parents, one broken and one empty: both are reported."""
    write("a: [\n", "broken.yaml")
    write("# nothing\n", "empty.yaml")
    found = problems("extends: [broken.yaml, empty.yaml]\n" + MINIMAL)
    assert found[0].startswith("broken.yaml:2:1: invalid YAML")
    assert found[1].startswith("empty.yaml: the file is empty.")


def test_aliases_cannot_blow_a_config_up() -> None:
    """Nested aliases that would expand to 9^9 items are refused without expanding them."""
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
    found = problems(MINIMAL + "\n".join(lines) + "\nquantization: {exclude: *a9}\n")
    assert len(found) == 10 + 1
    assert any("quantization.exclude: takes texts as items, not a list." in problem for problem in found)


def test_anchors_work() -> None:
    """Plain YAML reuse inside a file is allowed."""
    config = load(
        write(
            MINIMAL + "calibration: {max_seq_len: &n 64}\nengine: {max_seq_len: *n}\nserving: {default_max_tokens: 8}\n"
        )
    )
    assert config.config.engine.max_seq_len == 64


def test_a_commit_of_digits_stays_text() -> None:
    """YAML would read 40 digits as a number, and 1e5… as a float."""
    commit = "1234567890" * 4
    config = load(write(f"name: a\nsource: {{hub: o/n, revision: {commit}}}\n")).config
    assert config.source.revision == commit


def test_scalars_follow_the_yaml_1_2_core_schema() -> None:
    """1e-3 is a number, 010 is ten, 0x10 is sixteen."""
    config = load(write(MINIMAL + "verify: {max_kl: 1e-3}\ncalibration: {num_samples: 010, batch_size: 0x10}\n")).config
    assert (config.verify.max_kl, config.calibration.num_samples, config.calibration.batch_size) == (0.001, 10, 16)


@pytest.mark.parametrize("path", ["~/model", "$HOME/model", "${MODELS}/a"])
def test_paths_that_depend_on_the_environment_are_refused(path: str) -> None:
    """The same file means the same build for everybody."""
    (found,) = problems(f"name: a\nsource: {{path: '{path}'}}\n")
    assert found.startswith(f"x.yaml:2 source.path: '{path}' depends on the environment")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.max_batch=3", "--set engine.max_batch: unknown key 'engine.max_batch'. Did you mean"),
        ("max_num_seqs=3", "--set max_num_seqs: unknown key 'max_num_seqs'. Here it is 'engine.max_batch_size'."),
        ("engine.max_batch_size", "--set engine.max_batch_size: 'engine.max_batch_size' is not key=value."),
        ("engine.max_batch_size=x", "--set engine.max_batch_size: 'x' is not a whole number of at least 1."),
        ("engine.max_batch_size.x=1", "'engine.max_batch_size' takes a whole number of at least 1 and has no keys"),
        ("quantization.exclude=[a", "--set quantization.exclude: invalid YAML"),
        ("extends=b.yaml", "--set extends: 'extends' cannot be set from outside."),
        ("engine=cpu", "Did you mean engine.target: cpu?"),
    ],
)
def test_a_wrong_override_is_named_as_such(override: str, expected: str) -> None:
    """Overrides get the same care as files."""
    found = problems(MINIMAL, override)
    assert any(expected in problem for problem in found), found


def test_overrides_win_over_files_and_later_ones_over_earlier_ones() -> None:
    """Values are YAML: numbers, lists, mappings and null."""
    overrides = [
        "engine.max_batch_size=1",
        "engine.max_batch_size=2",
        "engine={max_num_tokens: 99, kv_cache: {size_gib: 1.5}}",
        "quantization.exclude=[lm_head, '*.down_proj']",
        "engine.gpu=",
    ]
    config = load(write(MINIMAL + "engine: {gpu: H100, num_threads: 3}\n"), overrides).config
    assert config.engine.max_batch_size == 2
    assert config.engine.max_num_tokens == 99
    assert config.engine.kv_cache.size_gib == 1.5
    assert config.engine.num_threads == 3
    assert config.engine.gpu is None
    assert config.quantization.exclude == ("lm_head", "*.down_proj")


class _NoEnvironment(dict[str, str]):
    """Fails on any look at the environment."""

    def __getitem__(self, key: str) -> str:
        raise AssertionError(f"read {key} from the environment")

    def __contains__(self, key: object) -> bool:
        raise AssertionError(f"looked for {key} in the environment")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("listed the environment")

    def get(self, key: str, default: object = None) -> str:
        raise AssertionError(f"read {key} from the environment (default {default})")


def test_loading_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that fails on every look is never looked at, in success and in failure."""
    write(MINIMAL)
    monkeypatch.setattr(os, "environ", _NoEnvironment())
    try:
        good = load(Path("x.yaml"), ["engine.max_batch_size=2"])
        with pytest.raises(ConfigError):
            load(Path("x.yaml"), ["engine.max_batch_size=x"])
    finally:
        monkeypatch.undo()
    assert good.config.engine.max_batch_size == 2


def test_no_module_of_the_room_names_the_environment() -> None:
    """Neither os.environ nor a function that expands from it appears in the room's code."""
    files = sorted(Path(pipeline.config.__file__).parent.glob("*.py"))
    assert len(files) >= 10
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert not names & {"environ", "getenv", "expanduser", "expandvars", "home"}
