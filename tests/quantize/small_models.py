"""Small random models with a real tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times; so it goes. " * 40


def byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with 256 tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=letters[0])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def llama(folder: Path | None = None, seed: int = 0, dtype=torch.bfloat16, **changes):
    """A random Llama; hidden 192 and 64 key channels, so every kind of padding occurs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.07,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    with torch.no_grad():
        # Rows and channels of very different sizes, as trained models have them.
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter *= torch.exp(0.5 * torch.randn(parameter.shape[1]))
            else:
                parameter *= torch.exp(0.2 * torch.randn(parameter.shape))
    model = model.to(dtype)
    if folder is not None:
        model.save_pretrained(folder)
        byte_tokenizer(folder)
    return model
