"""Models of other packages, from their own configs, small and with random weights. Packages are imported when built."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purestep as ps
from tests.plain_loop import Case

ROWS, LENGTH, VOCABULARY, IMAGE = 8, 10, 64, 16


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": VOCABULARY, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, use_cache=False, **tokens, **dropout))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **dropout))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=IMAGE, patch_size=4, num_labels=VOCABULARY, **sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    # More than a rank's tokens can visit, so that some are used on some ranks only.
    experts = {"num_local_experts": 48, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **experts))


def resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=VOCABULARY, channels=(8, 8, 16, 16), stem_width=8)


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), num_classes=VOCABULARY, patch_size=1, kernel_sizes=3)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16),
    }
    return UNet2DModel(IMAGE, layers_per_block=1, norm_num_groups=4, attention_head_dim=4, **blocks)


def _tokens(step: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def _images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, IMAGE, IMAGE, generator=generator), torch.randint(
        VOCABULARY, (ROWS,), generator=generator
    )


def _next_token(model: Any, tokens: Tensor, key: Any) -> ps.Mean:
    logits = model(input_ids=tokens).logits[:, :-1]
    return _cross_entropy(logits, tokens[:, 1:])


def _masked_token(model: Any, tokens: Tensor, key: Any) -> ps.Mean:
    masked = tokens.where(torch.arange(LENGTH) % 3 > 0, 0)
    return _cross_entropy(model(input_ids=masked, attention_mask=torch.ones_like(tokens)).logits, tokens)


def _translated(model: Any, tokens: Tensor, key: Any) -> ps.Mean:
    """The model's own loss, which it computes from the labels it is given."""
    out = model(input_ids=tokens, labels=tokens.flip(-1))
    return ps.Mean(out.loss * tokens.numel(), tokens.numel())


def _classified(model: Any, batch: tuple[Tensor, Tensor], key: Any) -> ps.Mean:
    images, labels = batch
    out = model(images)
    return _cross_entropy(getattr(out, "logits", out), labels)


def _denoised(model: Any, batch: tuple[Tensor, Tensor], key: Any) -> ps.Mean:
    images, timesteps = batch
    error = model(images, timesteps).sample - images.flip(-1)
    return ps.Mean(error.square().sum(), error.numel())


def _cross_entropy(logits: Tensor, labels: Tensor) -> ps.Mean:
    return ps.Mean(F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel())


def _units(*rules: str, **fields: Any) -> ps.ShardingSpec:
    return ps.ShardingSpec(units=rules, **fields)


CASES: dict[str, dict[str, Case]] = {
    "transformers": {
        "llama": Case(llama, _next_token, _tokens, _units("LlamaDecoderLayer")),
        "gpt2": Case(gpt2, _next_token, _tokens, _units("GPT2Block")),
        "bert": Case(bert, _masked_token, _tokens, _units("BertLayer")),
        "t5": Case(t5, _translated, _tokens, _units("T5Block")),
        "vit": Case(vit, _classified, _images, _units("ViTLayer")),
        "mixtral": Case(mixtral, _next_token, _tokens, _units("MixtralDecoderLayer")),
    },
    "timm": {
        "resnet": Case(resnet, _classified, _images, _units("BasicBlock")),
        "convnext": Case(convnext, _classified, _images, _units("ConvNeXtBlock"), meta=False),
    },
    "diffusers": {"unet": Case(unet, _denoised, _images, _units("ResnetBlock2D", "Attention"))},
}


def cases_of(packages: list[str]) -> dict[str, Case]:
    """For `tests.plain_loop.everywhere`."""
    return {name: case for package in packages for name, case in CASES[package].items()}
