"""The core model on a GPU: TensorRT-LLM's own Triton backend and an engine, built here or by the node that serves.

The tensors are the template's, which are the backend's (one contract for every target). Directories beside the version
directories' own files are no models to Triton (tried on 2.51), so checkpoint and compile step of an engine that is not
built yet lie in the version directory, where build.sh puts the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError, IntegrityError
from pipeline.host.files import link_or_copy
from pipeline.triton.backend_parameters import CORE_MODEL, Decision, EngineFacts, decide, find_conflicts
from pipeline.triton.core_model import Emission
from pipeline.triton.launch import DEPLOYMENT, ENGINE_BACKEND, launch_script, plan
from pipeline.triton.model_config import ModelConfig, data_type
from pipeline.triton.warm_up import add_warm_up, write_warm_up_data

_LOGITS: Final = ("draft_logits", "context_logits", "generation_logits")
_PARTS: Final = {"built": ("engine",), "deferred": ("checkpoint", "build")}
_PROMPT_TABLE_TYPES: Final = {"bfloat16": "TYPE_BF16", "float16": "TYPE_FP16"}
_REQUIRED: Final = {
    "built": "engine/config.json",
    "deferred": "build/build.sh",
}


class EngineCore:
    """See the module's docstring."""

    whole_responses = False
    # The image has what the text models import: numpy, tokenizers and jinja2 come with torch and transformers.
    packages = ()

    def configure(self, configs: Mapping[str, ModelConfig], emission: Emission) -> tuple[Decision, ...]:
        """Write every parameter; tensor types and batch sizes that depend on the engine go into all models.

        Raises:
            ConfigError: wishes that cannot be honoured; all are named.
            IntegrityError: the engine directory is incomplete.
        """
        facts = read_facts(emission.engine_dir, emission.engine)
        conflicts = find_conflicts(facts, emission.serving)
        if conflicts:
            raise ConfigError("the serving section asks for what this engine cannot do", problems=conflicts)
        core = configs[CORE_MODEL]
        core.backend = ENGINE_BACKEND
        core.parameters.clear()
        core.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
        decisions = decide(facts, emission.serving, version_directory=emission.version_directory)
        for decision in decisions:
            core.parameters[decision.key].string_value = decision.text
        batch = emission.serving.tensorrt_llm.triton_max_batch_size
        for config in configs.values():
            config.max_batch_size = batch or config.max_batch_size
        core.dynamic_batching.preferred_batch_size[:] = [core.max_batch_size]
        batching = core.dynamic_batching
        batching.max_queue_delay_microseconds = emission.serving.tensorrt_llm.max_queue_delay_microseconds or 0
        # The backend takes this for its own queue as well.
        batching.default_queue_policy.max_queue_size = emission.serving.max_queue_size
        fields = _set_types(configs, facts, emission)
        if emission.serving.warmup:
            add_warm_up(core, emission.engine["limits"])
        return (*(decision for decision in decisions if decision.why), *fields)

    def write(self, emission: Emission, out: Path) -> None:
        """Put the engine, or checkpoint and compile step, and the launcher in place."""
        version = out / CORE_MODEL / "1"
        for part in _PARTS[emission.engine["state"]]:
            link_or_copy(emission.engine_dir / part, version / part)
        link_or_copy(emission.engine_dir / "engine.json", version / "engine.json")
        if emission.serving.warmup:
            write_warm_up_data(out / CORE_MODEL, emission.engine["limits"])
        if emission.serving.tensorrt_llm.guided_decoding_backend is not None:
            info = xgrammar_tokenizer_info(emission.engine_dir / "tokenizer", emission.engine["eos_token_ids"])
            text = json.dumps(info, ensure_ascii=False)
            (version / "xgrammar_tokenizer_info.json").write_text(text, encoding="utf-8")
        write_launcher(emission, out)

    def readme(self, emission: Emission) -> str:
        """Return how to start the server."""
        engine = emission.engine
        chain, gpu = engine["toolchain"], engine["gpu"]
        machine = f"{engine['world_size']} x {gpu['name']} (SM {gpu['sm']})"
        text = f"""For {machine}, TensorRT-LLM {chain["tensorrt_llm"]}: serve it in `{chain["image"]}`
with this directory mounted at `{emission.mount}`; paths in config.pbtxt begin there. Where this was written there was
no GPU: **nothing of it was run**. `trtpipe check .` tells what does not fit.

    docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 127.0.0.1:8000-8002:8000-8002 \\
      -v "$PWD:{emission.mount}" {chain["image"]} sh {emission.mount}/launch.sh

The image has everything that the Python models import.
"""
        if engine["state"] == "deferred":
            text += f"""
The engine is **not built yet**. Once, on the GPU node and in the same image, before the server starts:

    sh {emission.mount}/{CORE_MODEL}/1/build/build.sh

`{CORE_MODEL}/1/build` has the same step as a compose service and as a Kubernetes Job. It does nothing when the engine
is there.
"""
        return text


def read_facts(engine_dir: Path, engine: Mapping[str, Any]) -> EngineFacts:
    """Read what the engine, or the checkpoint it will be made of, says about the model.

    Raises:
        IntegrityError: a file of the engine is missing or no JSON.
    """
    state = engine["state"]
    required = engine_dir / _REQUIRED[state]
    if not required.is_file():
        raise IntegrityError(f"{required} is missing", hint="Compile again.")
    path = engine_dir / ("engine" if state == "built" else "checkpoint") / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read: {error}", hint="Compile again.") from error
    return EngineFacts(engine=engine, pretrained=document.get("pretrained_config", document))


def _set_types(configs: Mapping[str, ModelConfig], facts: EngineFacts, emission: Emission) -> tuple[Decision, ...]:
    """Write tensor types that the engine decides into every model that has the tensor."""
    wishes, engine = emission.serving.tensorrt_llm, emission.engine
    logits = Decision(key="logits_datatype", value=facts.logits_type, why="the engine's logits_dtype.")
    types = dict.fromkeys(_LOGITS, facts.logits_type)
    decisions = [logits]
    if wishes.encoder_input_features_data_type is not None:
        types["encoder_input_features"] = wishes.encoder_input_features_data_type
    table: str | None = wishes.prompt_embedding_table_data_type
    if table is None and engine["build_config"].get("max_prompt_embedding_table_size"):
        decided = _PROMPT_TABLE_TYPES[engine["dtype"]]
        decisions.append(Decision(key="prompt_embedding_table_data_type", value=decided, why="the engine's dtype."))
        table = decided
    if table is not None:
        types["prompt_embedding_table"] = table
    for config in configs.values():
        for tensor in (*config.input, *config.output):
            if tensor.name in types:
                tensor.data_type = data_type(types[tensor.name])
    return tuple(decisions)


def write_launcher(emission: Emission, out: Path) -> None:
    """Write deployment.json and launch.sh."""
    engine = emission.engine
    deployment = {
        "target": engine["target"],
        "mount": emission.mount,
        "launch_mode": emission.serving.launch_mode,
        "world_size": engine["world_size"],
        "environment": _environment(engine),
        "image": engine["toolchain"]["image"],
    }
    text = json.dumps(deployment, indent=2, sort_keys=True)
    (out / DEPLOYMENT).write_text(f"{text}\n", encoding="utf-8")
    script = out / "launch.sh"
    script.write_text(launch_script(plan(out), image=engine["toolchain"]["image"]), encoding="utf-8")
    script.chmod(0o755)


def _environment(engine: Mapping[str, Any]) -> list[str]:
    """Known issue of 1.0 (docs/source/release-notes.md@001eaec): Llama 3 with pipeline ranks and FP8 weights."""
    is_llama = str(engine["architecture"]).startswith("Llama")
    quantized = str(engine["quantization"].get("quant_algo") or "") in ("FP8", "NVFP4", "MIXED_PRECISION")
    if engine["toolchain"]["tensorrt_llm"].startswith("1.0.") and is_llama and quantized and engine["pp"] > 1:
        return ["TRTLLM_LLAMA_EAGER_FUSION_DISABLED=1"]
    return []


def xgrammar_tokenizer_info(tokenizer_dir: Path, stop_token_ids: list[int]) -> dict[str, Any]:
    """Return what guided decoding wants to know about the tokenizer.

    Keys as the backend reads them (model_instance_state.cc@0c8de69); `encoded_vocab[id]` is the token, "" where no
    token has the id.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    return {
        "encoded_vocab": [tokens.get(number, "") for number in range(max(tokens) + 1)],
        "tokenizer_str": tokenizer.to_str(),
        "stop_token_ids": list(stop_token_ids),
    }
