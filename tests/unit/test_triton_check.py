"""`check` on an emitted repository that is damaged in one place at a time: each finding has its row and its words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deployment import ServingConfig
from pipeline.triton.check import check
from pipeline.triton.check_load import Finding
from pipeline.triton.model_config import data_type, parse, render
from pipeline.triton.repository import emit
from tests.support.gpu_engine import llama_8b_fp8, llmapi_model

pytestmark = pytest.mark.fast

CORE = "tensorrt_llm"
ENGINE = f"{CORE}/1/engine"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emitted repository of a built engine."""
    directory = tmp_path_factory.mktemp("healthy")
    emit(llama_8b_fp8(directory / "engine"), ServingConfig(), name="llama", out=directory / "out")
    return directory / "out"


@pytest.fixture
def repository(healthy: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    import shutil

    return Path(shutil.copytree(healthy, tmp_path / "repository"))


def edit(repository: Path, model: str, change: Callable[[Any], None]) -> None:
    """Change a configuration as a message."""
    path = repository / model / "config.pbtxt"
    config = parse(path.read_text(), model)
    change(config)
    path.write_text(render(config))


def parameter(key: str, value: str, model: str = CORE) -> Callable[[Path], None]:
    """A damage that sets one parameter."""

    def damage(repository: Path) -> None:
        edit(repository, model, lambda config: setattr(config.parameters[key], "string_value", value))

    return damage


def without_parameter(key: str) -> Callable[[Path], None]:
    """A damage that removes one parameter of the core model."""

    def damage(repository: Path) -> None:
        edit(repository, CORE, lambda config: config.parameters.pop(key))

    return damage


def engine_json(path: str, value: Any) -> Callable[[Path], None]:
    """A damage that sets (None: removes) one value of the engine's config.json, by dotted path."""

    def damage(repository: Path) -> None:
        file = repository / ENGINE / "config.json"
        document = json.loads(file.read_text())
        *parents, name = path.split(".")
        place = document
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[name]
        else:
            place[name] = value
        file.write_text(json.dumps(document))

    return damage


def content(path: str, data: bytes) -> Callable[[Path], None]:
    """A damage that replaces a file's content."""
    return lambda repository: (repository / path).write_bytes(data) and None


def removed(path: str) -> Callable[[Path], None]:
    """A damage that removes a file or directory."""

    def damage(repository: Path) -> None:
        import shutil

        target = repository / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def field(model: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """A damage to fields of a configuration."""
    return lambda repository: edit(repository, model, change)


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    """Several damages at once."""

    def damage(repository: Path) -> None:
        for each in damages:
            each(repository)

    return damage


def rename_input(old: str, new: str) -> Callable[[Any], None]:
    """Rename an input tensor."""

    def change(config: Any) -> None:
        next(tensor for tensor in config.input if tensor.name == old).name = new

    return change


def retype_logits(config: Any) -> None:
    """Make all logits FP16."""
    for tensor in (*config.input, *config.output):
        if tensor.name in ("draft_logits", "context_logits", "generation_logits"):
            tensor.data_type = data_type("TYPE_FP16")


def second_engine(participant_ids: str) -> Callable[[Path], None]:
    """Add a copy of the core model under another name."""

    def damage(repository: Path) -> None:
        import shutil

        shutil.copytree(repository / CORE, repository / "draft")

        def change(config: Any) -> None:
            config.name = "draft"
            config.parameters["gpt_model_path"].string_value = "/models/draft/1/engine"
            config.parameters["participant_ids"].string_value = participant_ids

        edit(repository, "draft", change)

    return damage


def wire_to_nowhere(config: Any) -> None:
    """Take a tensor from where nothing produces it."""
    config.ensemble_scheduling.step[1].input_map["input_ids"] = "_NOWHERE"


def launch_mode(mode: str) -> Callable[[Path], None]:
    """Change deployment.json."""

    def damage(repository: Path) -> None:
        path = repository / "deployment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"launch_mode": mode}))

    return damage


def small_vocabulary(repository: Path) -> None:
    """Make the engine's vocabulary smaller than the tokenizer's."""
    path = repository / CORE / "1" / "engine.json"
    document = json.loads(path.read_text())
    document["limits"]["vocab_size"] = 100
    path.write_text(json.dumps(document))


DAMAGES = [
    ("TL2", content(f"{ENGINE}/manifest.json", b'{"compute_capability": "8.0"}'), "compute capability 8.0"),
    ("TL3", engine_json("version", "1.0.0"), "TensorRT-LLM 1.0.0 built this"),
    ("TL3", content(f"{ENGINE}/manifest.json", b'{"key": "other"}'), "another checkpoint or other options"),
    ("TL4", content(f"{ENGINE}/config.json", b'{"builder_config": {}}'), "ancient engine"),
    ("TL4", engine_json("build_config.max_seq_len", None), "lacks build_config.max_seq_len"),
    ("TL4", engine_json("build_config.plugin_config.context_fmha", None), "lacks plugin_config.context_fmha"),
    ("TL7", field(CORE, rename_input("min_tokens", "min_length")), "input 'min_length' is of generation 0.19"),
    ("TL7", field(CORE, rename_input("beam_width", "beam_wdth")), "Is it beam_width?"),
    ("TL30", parameter("max_beam_width", "4"), "max_beam_width 4 is more than the engine's 1"),
    ("TL39", content("ensemble/config.pbtxt", b'name: "ensemble"\nplatform ensemble\n'), "config.pbtxt:2:"),
    ("TL39", parameter("gpt_model_path", "${engine_dir}"), "is still '${engine_dir}'"),
    ("TL39", parameter("decoding_mode", "${decoding_mode}"), "the backend takes its default"),
    ("TL40", parameter("gpu_device_ids", r"0\,1"), "Write '0,1'"),
    ("TL41", parameter("gpt_model_path", "/models/tensorrt_llm/1/engin"), "does not exist"),
    ("TL41", parameter("gpt_model_path", "engine"), "is relative"),
    ("TL41", without_parameter("gpt_model_path"), "names no engine"),
    ("TL41", parameter("lora_prefetch_dir", "/models/adapters"), "'/models/adapters' does not exist"),
    ("TL41", parameter("tokenizer_dir", "/models/nowhere", "preprocessing"), "tokenizer_dir '/models/nowhere'"),
    ("TL42", content(f"{ENGINE}/config.json", b""), "is empty, not JSON"),
    ("TL42", content(f"{ENGINE}/config.json", b"{"), "is not JSON"),
    ("TL42", content(f"{ENGINE}/config.json", b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    ("TL42", content(f"{ENGINE}/rank0.engine", b""), "rank0.engine: is empty"),
    ("TL43", without_parameter("guided_decoding_backend"), "'guided_decoding_backend' is missing"),
    ("TL43", without_parameter("tokenizer_dir"), "'tokenizer_dir' is missing"),
    (
        "TL44",
        engine_json("build_config.plugin_config.use_paged_context_fmha", False),
        "enable_chunked_context is on, and the engine has no paged context FMHA",
    ),
    (
        "TL44",
        both(
            engine_json("build_config.plugin_config.use_paged_context_fmha", False),
            without_parameter("enable_kv_cache_reuse"),
        ),
        "is not written, so it is on",
    ),
    ("TL45", parameter("max_tokens_in_paged_kv_cache", "100"), "do not hold one sequence of max_seq_len 8192"),
    ("TL47", engine_json("pretrained_config.mapping.world_size", 2), "world_size 2 is not tp 1"),
    ("TL47", content(f"{ENGINE}/rank1.engine", b"x"), "has 2 rank files"),
    ("TL47", parameter("gpu_device_ids", "0,1"), "'0,1' is not 1 different GPUs"),
    ("TL48", second_engine("2"), "several engines do not fit into one server in leader mode"),
    ("TL50", both(second_engine("1"), parameter("participant_ids", "1")), "belongs to"),
    ("TL50", parameter("participant_ids", "0"), "rank 0 is the orchestrator"),
    ("TL50", parameter("participant_ids", "1,2"), "is not 1 ranks"),
    ("TL50", parameter("participant_ids", "one"), "is not a list of MPI ranks"),
    ("TL50", launch_mode("orchestrator_no_spawn"), "participant_ids is mandatory"),
    ("TL51", content("preprocessing/1/tokenizer/tokenizer.json", b"{}"), "does not load"),
    ("TL51", removed("preprocessing/1/tokenizer/tokenizer.json"), "has no tokenizer.json"),
    (
        "TL51",
        content("preprocessing/1/tokenizer/tokenizer_config.json", b'{"auto_map": {}}'),
        "needs Python code of its checkpoint",
    ),
    ("TL51", small_vocabulary, "the engine's vocabulary is 100"),
    ("TL52", parameter("kv_cache_free_gpu_memory_fraction", "0.9"), "Write kv_cache_free_gpu_mem_fraction"),
    ("TL52", parameter("enable_chunked_contxt", "true"), "Write enable_chunked_context"),
    ("TL52", parameter("worker_path", "/x"), "Write executor_worker_path"),
    ("TL52", parameter("kv_cache_free_gpu_mem_fraction", "90%"), "the default would apply"),
    ("TL52", parameter("cuda_graph_mode", "on please"), "the default would apply"),
    ("TL52", parameter("decoding_mode", "lookahead"), "does not load without lookahead_window_size"),
    ("TL52", parameter("tokenizer_type", "auto", "preprocessing"), "'tokenizer_type' has no effect"),
    ("TL53", parameter("cross_kv_cache_fraction", "0.5"), "there is no encoder"),
    ("TL53", parameter("encoder_model_path", "/models/tensorrt_llm/1/engine"), "needs cross_kv_cache_fraction"),
    ("TL56", engine_json("build_config.kv_cache_type", "CONTINUOUS"), "kv_cache_type (CONTINUOUS)"),
    ("TL56", engine_json("build_config.plugin_config.remove_input_padding", False), "remove_input_padding"),
    ("TL57", parameter("gpt_model_type", "V1"), "was removed"),
    ("TL57", parameter("gpt_model_type", "inflight"), "'inflight' is no batching strategy"),
    (
        "TL59",
        field(CORE, lambda config: setattr(config.model_transaction_policy, "decoupled", False)),
        "tensorrt_llm false, tensorrt_llm_bls true",
    ),
    ("TL62", engine_json("build_config.max_batch_size", 32), "max_batch_size 64 is more than the engine's 32"),
    (
        "TL63",
        field("postprocessing", lambda config: setattr(config, "max_batch_size", 8)),
        "postprocessing 8",
    ),
    ("TL63", field("ensemble", wire_to_nowhere), "nothing produces tensor '_NOWHERE'"),
    ("TL64", parameter("lora_cache_optimal_adapter_size", "8"), "the engine has no lora_plugin"),
    (
        "TL66",
        both(
            engine_json("build_config.kv_cache_type", "DISABLED"),
            engine_json("build_config.plugin_config.lora_plugin", "bfloat16"),
        ),
        "segmentation fault",
    ),
    ("TL67", parameter("guided_decoding_backend", "xgrammar"), "'xgrammar_tokenizer_info_path' is empty"),
    (
        "TL67",
        both(
            parameter("guided_decoding_backend", "xgrammar"),
            parameter("xgrammar_tokenizer_info_path", "/models/deployment.json"),
        ),
        "lacks encoded_vocab",
    ),
    ("TL68", engine_json("pretrained_config.logits_dtype", "float16"), "the engine's logits are TYPE_FP16"),
    ("TL68", field("ensemble", retype_logits), "has another type than in tensorrt_llm"),
    ("layout", removed(f"{CORE}/config.pbtxt"), "has no config.pbtxt"),
    ("layout", removed("ensemble/1"), "has no version directory"),
    ("layout", field("ensemble", lambda config: setattr(config, "name", "chain")), "is named 'chain'"),
    ("layout", content("deployment.json", b"{"), "is not JSON"),
]


def found(repository: Path) -> list[Finding]:
    """Findings with their rows."""
    return [finding for finding in check(repository) if isinstance(finding, Finding)]


def test_emitted_repository_has_no_finding(healthy: Path) -> None:
    """What we write passes our own check."""
    assert [str(finding) for finding in check(healthy)] == []


@pytest.mark.parametrize(("row", "damage", "words"), DAMAGES, ids=[f"{row}-{words[:32]}" for row, _, words in DAMAGES])
def test_damage_is_found(repository: Path, row: str, damage: Callable[[Path], None], words: str) -> None:
    """The finding carries its row and says what is wrong, or what to write."""
    damage(repository)
    assert [finding for finding in found(repository) if finding.id == row and words in str(finding)]


def test_finding_names_file_and_line(repository: Path) -> None:
    """A person can go to the place."""
    parameter("gpt_model_type", "V1")(repository)
    (finding,) = [finding for finding in found(repository) if finding.id == "TL57"]
    file, line = finding.where.split(":")
    assert '"gpt_model_type"' in (repository / file).read_text().splitlines()[int(line) - 1]


def test_everything_is_reported_at_once(repository: Path) -> None:
    """Independent damages do not hide each other."""
    for damage in (
        parameter("gpt_model_type", "V1"),
        without_parameter("tokenizer_dir"),
        engine_json("build_config.max_batch_size", 32),
        content("preprocessing/1/tokenizer/tokenizer.json", b"{}"),
    ):
        damage(repository)
    assert {"TL57", "TL43", "TL62", "TL51"} <= {finding.id for finding in found(repository)}


def test_engine_that_is_not_built_yet_is_a_warning(tmp_path: Path) -> None:
    """A deferred repository is right as it is; the finding says what to run."""
    engine = llama_8b_fp8(tmp_path / "engine", state="deferred")
    emit(engine, ServingConfig(), name="x", out=tmp_path / "out")
    (finding,) = found(tmp_path / "out")
    assert (finding.id, finding.severity) == ("TL41", "warning")
    assert "build.sh" in finding.hint


def test_llmapi_repository_passes_and_decoupled_must_agree(tmp_path: Path) -> None:
    """model.yaml and config.pbtxt say the same, or TL55 tells."""
    emit(llmapi_model(tmp_path / "engine"), ServingConfig(), name="x", out=tmp_path / "out")
    assert check(tmp_path / "out") == []
    edit(tmp_path / "out", CORE, lambda config: setattr(config.model_transaction_policy, "decoupled", False))
    assert "TL55" in {finding.id for finding in found(tmp_path / "out")}


def test_mount_maps_paths_of_a_hand_made_repository(repository: Path) -> None:
    """Without deployment.json the mount has to be named for absolute paths to be found."""
    (repository / "deployment.json").unlink()
    assert "TL41" in {finding.id for finding in found(repository)}
    assert check(repository, mount=Path("/models")) == []


def test_missing_directory_is_one_finding(tmp_path: Path) -> None:
    """Nothing to check."""
    assert [str(finding) for finding in check(tmp_path / "none")] == [
        f"{tmp_path / 'none'}: is no directory. Name the model repository. [layout]"
    ]
