"""Migration of three engine repositories: ours, triton_cli's, and one made by hand with everything odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.load import load
from pipeline.config.trtllm_options import BackendParameters
from pipeline.triton.migrate import Migration, migrate
from pipeline.triton.migrate_table import table
from pipeline.triton.model_config import find_problems, parse, render
from tests.support.old_repositories import OLD, edited

pytestmark = pytest.mark.fast

CLI = OLD / "triton_cli" / "models"


@pytest.fixture
def ours(tmp_path: Path) -> Migration:
    """Migration of a repository as trtpipe emits it: FP8 on two H100."""
    return migrate(OLD / "ours", tmp_path / "new")


@pytest.fixture
def by_hand(tmp_path: Path) -> Migration:
    """Migration of a repository with left-over placeholders, odd values and INT8."""
    return migrate(OLD / "handmade", tmp_path / "new", engine_dir=OLD / "handmade_engine", gpu="A100")


def model_yaml(migration: Migration) -> dict[str, Any]:
    """model.yaml as data."""
    document = yaml.safe_load((migration.repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert isinstance(document, dict)
    return document


def model_config(migration: Migration) -> Any:
    """config.pbtxt as a message."""
    return parse((migration.repository / "tensorrt_llm" / "config.pbtxt").read_text(), "new")


def lost(migration: Migration) -> dict[str, str]:
    """What did not go over: setting -> old value."""
    return {each.where: each.old for each in migration.lost}


def warned(migration: Migration) -> list[str]:
    """The places of all problems."""
    return [problem.where for problem in migration.problems]


def test_our_repository_becomes_a_config_that_loads(ours: Migration) -> None:
    """Format, KV cache, sizes and serving values of the engine and its parameters are in the new config."""
    config = load(ours.config).config
    engine = config.engine
    assert (engine.target, engine.gpu, engine.dtype) == ("tensorrt_llm_llmapi", "H100", "bfloat16")
    assert (config.quantization.format, config.quantization.kv_cache) == ("fp8", "fp8")
    assert (engine.tensor_parallel_size, engine.max_batch_size) == (2, 64)
    assert (engine.max_num_tokens, engine.max_seq_len) == (8192, 16384)
    assert engine.kv_cache.free_gpu_memory_fraction == 0.85
    assert engine.kv_cache.host_memory_bytes == 8589934592
    assert (config.serving.max_queue_size, config.serving.exclude_input_in_output) == (128, True)
    assert config.serving.tensorrt_llm.guided_decoding_backend == "xgrammar"
    assert config.serving.tensorrt_llm.cancellation_check_period_ms == 50
    assert config.source.path == Path("/checkpoints/llama-3.1-8b-instruct")


def test_our_repository_becomes_model_yaml(ours: Migration) -> None:
    """Names and values of LLM()'s arguments (upstream's llm_args.py), and Triton's section."""
    assert model_yaml(ours) == {
        "model": "/checkpoints/llama-3.1-8b-instruct",
        "backend": "pytorch",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_batch_size": 64,
        "max_num_tokens": 8192,
        "max_seq_len": 16384,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "guided_decoding_backend": "xgrammar",
        "kv_cache_config": {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": 0.85,
            "host_cache_size": 8589934592,
            "tokens_per_block": 32,
        },
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "triton_config": {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 50},
    }


def test_new_config_pbtxt_is_upstreams_llmapi_model(ours: Migration) -> None:
    """One Python model, text in and out, no batching, streaming as before."""
    config = model_config(ours)
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert {"sampling_param_max_tokens", "streaming", "stop"} <= {tensor.name for tensor in config.input}
    assert "text_output" in {tensor.name for tensor in config.output}
    assert parse(render(config), "new") == config
    assert find_problems({"tensorrt_llm": config}) == []


def test_nothing_of_a_clean_repository_is_lost(ours: Migration) -> None:
    """Our own repository goes over whole; to see to are source, quantized weights, and a key that is missing."""
    assert ours.lost == ()
    assert warned(ours) == ["source", "model.yaml model", "model.yaml"]
    assert "no key for it: scheduler_config.capacity_scheduler_policy" in ours.problems[-1].message


def test_triton_cli_engine_is_found_beside_the_repository(tmp_path: Path) -> None:
    """gpt_model_path names a place in the container; the engine lies next to the repository here."""
    migration = migrate(CLI, tmp_path / "new")
    config = load(migration.config).config
    assert (config.engine.max_batch_size, config.engine.max_seq_len) == (256, 131072)
    assert config.engine.kv_cache.tokens_per_block == 64
    assert config.quantization.format == "bf16"


def test_unfilled_parameters_are_reported_and_take_the_backends_default(tmp_path: Path) -> None:
    """A placeholder in a string counts as not set, with its line."""
    migration = migrate(CLI, tmp_path / "new")
    texts = [problem for problem in migration.problems if "placeholder" in problem.message]
    assert len(texts) == 10
    line = (
        (CLI / "tensorrt_llm" / "config.pbtxt")
        .read_text()
        .splitlines()
        .index('    string_value: "${kv_cache_free_gpu_mem_fraction}"')
    )
    assert texts[0].where == f"tensorrt_llm/config.pbtxt:{line + 1}"
    assert "free_gpu_memory_fraction" not in model_yaml(migration)["kv_cache_config"]
    assert model_yaml(migration)["kv_cache_config"]["enable_block_reuse"] is True


def test_hub_id_of_the_tokenizer_is_not_taken_for_pinned(tmp_path: Path) -> None:
    """The new model.yaml names the hub id, and the report asks for a commit."""
    migration = migrate(CLI, tmp_path / "new")
    assert model_yaml(migration)["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    (problem,) = [problem for problem in migration.problems if problem.where == "source"]
    assert "not pinned to a commit" in problem.message


def test_prompts_that_the_old_engine_refused_are_split(tmp_path: Path) -> None:
    """Without chunked context the old engine took 8192 of 131072 tokens; the change is reported."""
    migration = migrate(CLI, tmp_path / "new")
    assert model_yaml(migration)["enable_chunked_prefill"] is True
    assert "engine.enable_chunked_context" in warned(migration)


def test_int8_does_not_exist_in_the_new_lane(by_hand: Migration) -> None:
    """SmoothQuant and INT8 KV are of engines only: 16 bit is written, and both are listed with the reason."""
    config = load(by_hand.config).config
    assert (config.quantization.format, config.quantization.kv_cache, config.engine.dtype) == (
        "fp16",
        "auto",
        "float16",
    )
    reasons = {each.where: each.reason for each in by_hand.lost}
    assert "format of the engine path" in reasons["quantization.format"]
    assert "16 bit or as FP8" in reasons["quantization.kv_cache"]


def test_everything_that_cannot_go_over_is_listed_with_its_value(by_hand: Migration) -> None:
    """One entry per lost setting, none forgotten, none made up."""
    assert lost(by_hand) == {
        "tensorrt_llm decoding_mode": "medusa",
        "tensorrt_llm medusa_choices": "{0}, {0, 0}, {1}",
        "tensorrt_llm gpt_model_type": "V1",
        "tensorrt_llm gpu_weights_percent": "0.5",
        "tensorrt_llm lora_cache_max_adapter_size": "128",
        "tensorrt_llm lora_prefetch_dir": "/lora",
        "tensorrt_llm normalize_log_probs": "false",
        "tensorrt_llm participant_ids": "1,2;3,4",
        "tensorrt_llm my_own_flag": "7",
        "tensorrt_llm_bls tensorrt_llm_draft_model_name": "draft",
        "preprocessing instance_group.count": "4",
        "quantization.format": "int8_sq",
        "quantization.kv_cache": "int8",
    }
    assert all(each.reason and each.instead for each in by_hand.lost)


def test_values_that_the_backend_could_not_read_take_its_default(by_hand: Migration) -> None:
    """'yes' is no boolean and '0,8' no number for the backend either, so its defaults go over."""
    places = warned(by_hand)
    for key in ("enable_kv_cache_reuse", "kv_cache_free_gpu_mem_fraction", "batch_scheduler_policy"):
        assert f"tensorrt_llm {key}" in places
    document = model_yaml(by_hand)
    assert document["kv_cache_config"]["enable_block_reuse"] is True
    assert "scheduler_config" not in document
    assert "free_gpu_memory_fraction" not in document["kv_cache_config"]


def test_placeholders_in_the_grammar_do_not_stop_the_reading(by_hand: Migration) -> None:
    """Their lines are left out, each with its number; the comment that mentions one is not counted."""
    found = [problem.where for problem in by_hand.problems if "left out" in problem.message]
    assert found == [f"tensorrt_llm/config.pbtxt:{line}" for line in (5, 6, 10)]


def test_helper_model_that_cannot_be_parsed_is_reported_and_the_rest_goes_on(by_hand: Migration) -> None:
    """A broken postprocessing does not matter for the new repository."""
    (problem,) = [problem for problem in by_hand.problems if problem.where == "postprocessing/config.pbtxt"]
    assert problem.severity == "error"
    assert "thirty-two" in problem.message


def test_second_engine_is_named_and_not_merged(by_hand: Migration) -> None:
    """The draft model needs a repository of its own."""
    (problem,) = [problem for problem in by_hand.problems if problem.where == "draft"]
    assert "only 'tensorrt_llm' is migrated" in problem.message


def test_instances_and_their_gpus_go_over(by_hand: Migration) -> None:
    """Two instances on two GPUs each are an instance group and gpu_device_ids there too."""
    config = model_config(by_hand)
    assert config.instance_group[0].count == 2
    assert config.parameters["gpu_device_ids"].string_value == "0,1;2,3"


def test_windows_and_token_limit_go_to_model_yaml(by_hand: Migration) -> None:
    """Settings that the build config has no key for are in model.yaml, and the reader is told."""
    assert "kv_cache_config.max_tokens" in by_hand.problems[-1].message
    cache = model_yaml(by_hand)["kv_cache_config"]
    assert (cache["max_tokens"], cache["max_attention_window"]) == (65536, [4096, 8192])


def test_clients_are_told_every_input(by_hand: Migration) -> None:
    """Renamed, gone and unknown inputs of the old entry model."""
    changes = {each.old: each for each in by_hand.tensors}
    assert changes["max_tokens"].new == "sampling_param_max_tokens"
    assert changes["stream"].new == "streaming"
    assert (changes["bad_words"].new, changes["retention_decode_priority"].new) == ("", "")
    assert "priorities" in changes["retention_decode_priority"].reason
    assert changes["house_token"].reason == "not an input that is known here"


def test_report_names_everything(by_hand: Migration) -> None:
    """MIGRATION.md has each loss, each problem, each input, and where upstream's code comes from."""
    report = by_hand.report.read_text()
    for each in by_hand.lost:
        assert f"| {each.where} |" in report
    for problem in by_hand.problems:
        assert f"| {problem.where} |" in report
    for change in by_hand.tensors:
        assert f"| {change.old} |" in report
    assert "/app/all_models/llmapi" in report


def test_source_and_gpu_can_be_named(tmp_path: Path) -> None:
    """What the repository does not say is taken from the caller, and nothing is assumed then."""
    checkpoint = tmp_path / "checkpoint"
    migration = migrate(CLI, tmp_path / "new", source=checkpoint, gpu="A100", name="chat")
    config = load(migration.config).config
    assert (config.name, config.source.path, config.engine.gpu) == ("chat", checkpoint, "A100")
    assert model_yaml(migration)["model"] == str(checkpoint)
    assert not {"source", "engine.gpu"} & set(warned(migration))


def test_unknown_gpu_is_assumed_and_said(tmp_path: Path) -> None:
    """An engine does not record its GPU."""
    migration = migrate(CLI, tmp_path / "new")
    (problem,) = [problem for problem in migration.problems if problem.where == "engine.gpu"]
    assert "H100 is assumed" in problem.message


def test_format_that_the_gpu_cannot_run_is_lost(tmp_path: Path) -> None:
    """FP8 for an A100 falls back to 16 bit, weights and KV cache."""
    migration = migrate(OLD / "ours", tmp_path / "new", gpu="A100")
    config = load(migration.config).config
    assert (config.quantization.format, config.quantization.kv_cache) == ("bf16", "auto")
    assert lost(migration) == {"quantization.format": "fp8", "quantization.kv_cache": "fp8"}


def test_algorithm_without_a_format_is_lost(tmp_path: Path) -> None:
    """A name that trtpipe has no format for is not guessed at."""
    copy = edited(tmp_path, '"quant_algo": "FP8"', '"quant_algo": "W4A16_GPTQ"', "tensorrt_llm/1/engine/config.json")
    migration = migrate(copy, tmp_path / "new")
    assert lost(migration)["engine quantization.quant_algo"] == "W4A16_GPTQ"
    assert load(migration.config).config.quantization.format == "bf16"


def test_awq_keeps_its_group_size(tmp_path: Path) -> None:
    """INT4 AWQ goes over with the engine's group."""
    copy = edited(
        tmp_path,
        '"quant_algo": "FP8"',
        '"quant_algo": "W4A16_AWQ", "group_size": 64',
        "tensorrt_llm/1/engine/config.json",
    )
    quantization = load(migrate(copy, tmp_path / "new").config).config.quantization
    assert (quantization.format, quantization.group_size) == ("int4_awq", 64)


def test_every_parameter_of_the_backend_has_a_row() -> None:
    """Each option of the engine target's serving section is carried, dropped or replaced: none is forgotten."""
    fields = {"triton_max_batch_size", "decoupled_mode", "max_queue_delay_microseconds", "logits_datatype"}
    fields |= {"encoder_input_features_data_type", "prompt_embedding_table_data_type"}
    renamed = {"batching_strategy": "gpt_model_type", "encoder_engine_dir": "encoder_model_path"}
    rows = {row.key for row in (*table().carry, *table().drop) if row.model == "tensorrt_llm"} | set(table().replaced)
    options = [renamed.get(name, name) for name in BackendParameters.model_fields if name not in fields]
    assert len(options) > 40
    assert [name for name in options if name not in rows] == []


def test_new_names_of_inputs_are_inputs_of_the_llmapi_model() -> None:
    """No client is sent to a tensor that is not there."""
    named = {row.new for row in table().tensor if row.new}
    assert named <= set(table().input)
    assert all(row.new or row.reason for row in table().tensor)
