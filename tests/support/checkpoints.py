"""Tiny real checkpoints for tests: random weights, real architecture, real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(directory: Path, vocab_size: int = 512) -> None:
    """Write a byte-level BPE tokenizer with ids <|endoftext|>=0, <|im_start|>=1, <|im_end|>=2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["The capital of France is Paris and the capital of Italy is Rome, said the quick brown fox."] * 8, trainer
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": "<|endoftext|>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 256,
                "model_input_names": ["input_ids", "attention_mask"],
            },
            indent=2,
        )
    )


def tiny_llama(
    directory: Path,
    *,
    hidden_size: int = 128,
    layers: int = 2,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    kv_heads: int = 2,
) -> Path:
    """Write a random Llama (4 heads, vocab 512) with its tokenizer and return `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=512,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tie_word_embeddings,
        rope_theta=100000.0,
    )
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory, safe_serialization=True)
    tiny_tokenizer(directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0})
    )
    return directory


def sure_llama(directory: Path, *, max_position_embeddings: int) -> Path:
    """Write a tiny Llama that survives quantization under the limits for real models.

    Its embeddings are so large that a token, not the decoder's rounded weights, decides what comes next.
    """
    from safetensors.torch import load_file, save_file

    tiny_llama(directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 50
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_position_embeddings}))
    return directory
