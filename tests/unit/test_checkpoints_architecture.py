"""Architecture facts come from config.json and the safetensors headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.architecture import read_architecture
from pipeline.errors import Unreadable
from tests.support.checkpoint_files import write_checkpoint

pytestmark = pytest.mark.fast

LLAMA = {
    "model.embed_tokens.weight": [512, 16],
    "model.layers.0.input_layernorm.weight": [16],
    "model.layers.0.self_attn.q_proj.weight": [16, 16],
    "model.layers.0.self_attn.q_proj.bias": [16],
    "model.layers.0.self_attn.k_proj.weight": [8, 16],
    "model.layers.0.mlp.down_proj.weight": [16, 32],
    "model.layers.10.mlp.down_proj.weight": [16, 32],
    "model.layers.2.mlp.down_proj.weight": [16, 32],
    "model.norm.weight": [16],
    "lm_head.weight": [512, 16],
}


def read(tmp_path: Path, shapes: dict[str, list[int]] | None = None, **config: Any) -> Any:
    """Write a checkpoint and read its architecture."""
    return read_architecture(write_checkpoint(tmp_path / "model", shapes or LLAMA, **config))


def test_sizes_are_read(tmp_path: Path) -> None:
    """The config's own values, and head_dim from them where it is not given."""
    found = read(tmp_path)
    assert (found.hidden_size, found.intermediate_size, found.num_hidden_layers) == (16, 32, 1)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 2, 4)
    assert (found.vocab_size, found.max_position_embeddings) == (512, 64)


def test_linears_are_the_matrices_of_layers_and_the_head(tmp_path: Path) -> None:
    """Embeddings, norms and biases are none; layers come in the order of their numbers."""
    assert list(read(tmp_path).linears.items()) == [
        ("lm_head", (512, 16)),
        ("model.layers.0.mlp.down_proj", (16, 32)),
        ("model.layers.0.self_attn.k_proj", (8, 16)),
        ("model.layers.0.self_attn.q_proj", (16, 16)),
        ("model.layers.2.mlp.down_proj", (16, 32)),
        ("model.layers.10.mlp.down_proj", (16, 32)),
    ]


def test_routers_are_no_linears_and_experts_are(tmp_path: Path) -> None:
    """Mixtral's gate stays at 16 bit, its experts do not."""
    moe = "model.layers.0.block_sparse_moe"
    found = read(tmp_path, {f"{moe}.gate.weight": [8, 16], f"{moe}.experts.0.w1.weight": [32, 16]})
    assert dict(found.linears) == {f"{moe}.experts.0.w1": (32, 16)}


def test_fused_projections_are_linears(tmp_path: Path) -> None:
    """Phi-3 has one matrix for q, k and v."""
    found = read(tmp_path, {"model.layers.0.self_attn.qkv_proj.weight": [32, 16]}, model_type="phi3")
    assert dict(found.linears) == {"model.layers.0.self_attn.qkv_proj": (32, 16)}


def test_stop_ids_of_generation_config_win(tmp_path: Path) -> None:
    """generation_config.json has the list that chat models need."""
    directory = write_checkpoint(tmp_path / "model", LLAMA, eos_token_id=2, bos_token_id=1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}))
    found = read_architecture(directory)
    assert (found.eos_token_ids, found.bos_token_id, found.pad_token_id) == ((2, 0), 1, 0)


def test_stop_ids_fall_back_to_config(tmp_path: Path) -> None:
    """A checkpoint without generation_config.json stops at the config's id."""
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, {}),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, {}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, {}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
            5e5,
            {"rope_type": "llama3", "factor": 8.0},
        ),
    ],
)
def test_rope_is_read_in_each_of_its_spellings(
    tmp_path: Path, config: dict[str, Any], theta: float, scaling: dict[str, Any]
) -> None:
    """rope_theta and rope_scaling, or rope_parameters of transformers 5."""
    rope = read(tmp_path, **config).rope
    assert (rope.theta, dict(rope.scaling)) == (theta, scaling)


@pytest.mark.parametrize(
    ("config", "shapes", "tied"),
    [
        ({"tie_word_embeddings": True}, LLAMA, True),
        ({}, LLAMA, False),
        ({}, {"model.embed_tokens.weight": [512, 16]}, True),
    ],
)
def test_tied_embeddings_are_declared_or_seen(
    tmp_path: Path, config: dict[str, Any], shapes: dict[str, list[int]], tied: bool
) -> None:
    """Without a declaration, a missing lm_head means tied."""
    assert read(tmp_path, shapes, **config).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "torch.float16"}, "float16"), ({}, "float32")],
)
def test_dtype_is_declared_or_that_of_the_weights(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    """Both spellings of the field count, and the weights where there is none."""
    assert read(tmp_path, **config).dtype == dtype


def test_an_unknown_architecture_is_read_by_generic_names(tmp_path: Path) -> None:
    """GPT-2's spelling of the sizes is understood."""
    names = {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 99, "model_type": "newcomer"}
    taken = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    found = read(tmp_path, {"h.0.mlp.c_fc.weight": [96, 24]}, **names, **dict.fromkeys(taken))
    assert (found.hidden_size, found.num_hidden_layers, found.head_dim) == (24, 3, 4)
    assert dict(found.linears) == {"h.0.mlp.c_fc": (96, 24)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many', expected a positive integer"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
    ],
)
def test_a_config_without_sizes_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    """The key is named."""
    with pytest.raises(Unreadable, match=words):
        read(tmp_path, **config)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    """Neither torch nor transformers is loaded by resolving facts."""
    directory = write_checkpoint(tmp_path / "model", LLAMA)
    code = (
        "import sys; from pathlib import Path; from pipeline.checkpoints.architecture import read_architecture;"
        "from pipeline.checkpoints import resolve, tokenizer;"
        f"a = read_architecture(Path({str(directory)!r})); tokenizer.check_tokenizer(Path({str(directory)!r}), a);"
        "print({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
