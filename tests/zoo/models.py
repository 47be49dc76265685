"""The zoo: well-known architectures in tiny sizes, and what must be found in each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from incofl.tensors import Inputs
from tests.zoo import torchvision_style as tv

IMAGES = torch.zeros(3, 3, 16, 16)
LARGE = torch.zeros(3, 3, 32, 32)
TOKENS = {
    "input_ids": torch.arange(24).view(3, 8) % 30 + 1,
    "attention_mask": torch.ones(3, 8, dtype=torch.long),
}
PAIRS = {**TOKENS, "decoder_input_ids": torch.arange(15).view(3, 5) % 30 + 1}
SOUND = {"input_values": torch.zeros(3, 400)}

# The sizes of a tiny transformer; every config takes those that it has.
TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "num_labels": 10,
}
IMAGE = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_labels": 10,
}


@dataclass(frozen=True)
class Architecture:
    """A model with random weights, and inputs for it."""

    make: Callable[[], nn.Module]
    example: Inputs


class Found(NamedTuple):
    """What must be found in an architecture."""

    blocks: tuple[int, ...]  # number of blocks in each stage
    axes: int  # number of axes that can be narrowed
    pairs: int  # number of tensors that InCo mixes


def hf(kind: str, model: str, sizes: dict[str, Any], **options: Any) -> Callable[[], nn.Module]:
    """A factory of a transformers model with random weights."""

    def make() -> nn.Module:
        config = transformers.AutoConfig.for_model(model, **{**sizes, **options})
        module: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
        return module

    return make


def text(model: str, **options: Any) -> Architecture:
    return Architecture(hf("SequenceClassification", model, TEXT, **options), TOKENS)


def language(model: str, **options: Any) -> Architecture:
    return Architecture(hf("CausalLM", model, TEXT, use_cache=False, **options), TOKENS)


def image(model: str, example: torch.Tensor = IMAGES, **options: Any) -> Architecture:
    return Architecture(hf("ImageClassification", model, IMAGE, **options), example)


def torchvision(make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make, IMAGES)


KV = {"num_key_value_heads": 2, "head_dim": 4}
CONVS: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3], "num_channels": 3}

for unusable in (transformers.RegNetConfig, transformers.BitConfig):
    # Some versions of transformers refuse their own defaults of these two, kinds of blocks, as kinds of attention.
    checks: Any = getattr(unusable, "__class_validators__", [])
    checks[:] = [check for check in checks if check.__name__ != "validate_layer_type"]

ZOO: dict[str, Architecture] = {
    # Texts, encoders
    "bert": text("bert"),
    "roberta": text("roberta"),
    "distilbert": text("distilbert", dim=16, n_layers=3, n_heads=4, hidden_dim=24),
    "electra": text("electra", embedding_size=16),
    "albert": text("albert", embedding_size=8),
    "deberta": text("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": text("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "mpnet": text("mpnet"),
    "roformer": text("roformer"),
    "fnet": text("fnet"),
    "convbert": text("convbert", embedding_size=16, conv_kernel_size=3),
    "nystromformer": Architecture(  # a mask that hides something fails in its own code
        hf("SequenceClassification", "nystromformer", TEXT, num_landmarks=4, segment_means_seq_len=8),
        {"input_ids": TOKENS["input_ids"]},
    ),
    "squeezebert": text(
        "squeezebert",
        embedding_size=16,
        q_groups=1,
        k_groups=1,
        v_groups=1,
        output_groups=1,
        intermediate_groups=1,
        post_attention_groups=1,
    ),
    "mobilebert": text("mobilebert", embedding_size=16, true_hidden_size=8, intra_bottleneck_size=8),
    "xlnet": Architecture(
        hf(
            "SequenceClassification",
            "xlnet",
            {k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
            d_model=16,
            n_layer=3,
            n_head=4,
            d_inner=24,
        ),
        TOKENS,
    ),
    "modernbert": text("modernbert", global_attn_every_n_layers=2, local_attention=4),
    # Texts, decoders
    "gpt2": text("gpt2", n_embd=16, n_layer=3, n_head=4, n_positions=32),
    "gpt2-lm": language("gpt2", n_embd=16, n_layer=3, n_head=4, n_positions=32),
    "gpt-neo": text(
        "gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], num_hidden_layers=2
    ),
    "gpt-neox": text("gpt_neox"),
    "gptj": text("gptj", n_embd=16, n_layer=3, n_head=4, n_positions=32, rotary_dim=2),
    "opt": text("opt", ffn_dim=24, word_embed_proj_dim=16),
    "bloom": text("bloom", n_layer=3, n_head=4),
    "falcon": text("falcon"),
    "llama": text("llama", **KV),
    "llama-lm": language("llama", **KV),
    "mistral": text("mistral", **KV),
    "qwen2": text("qwen2", **KV),
    "qwen3": text("qwen3", **KV),
    "gemma": text("gemma", **KV),
    "phi": text("phi"),
    "phi3": text("phi3", num_key_value_heads=2),
    "stablelm": text("stablelm", num_key_value_heads=4),
    "mpt": text("mpt", d_model=16, n_layers=3, n_heads=4),
    "mamba-lm": language("mamba", state_size=4),
    "olmo2-lm": language("olmo2", num_key_value_heads=2),
    # Encoder and decoder
    "t5-lm": Architecture(hf("Seq2SeqLM", "t5", TEXT, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4), PAIRS),
    "bart-lm": Architecture(
        hf(
            "Seq2SeqLM",
            "bart",
            TEXT,
            d_model=16,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
        ),
        PAIRS,
    ),
    # Images
    "vit": image("vit"),
    "deit": image("deit", architectures=["DeiTForImageClassification"]),
    "beit": image("beit"),
    "dinov2": image("dinov2", mlp_ratio=2),
    "swin": image("swin", patch_size=2, embed_dim=8, depths=[2, 2], num_attention_heads=[2, 4], window_size=2),
    "swinv2": image("swinv2", patch_size=2, embed_dim=8, depths=[2, 2], num_attention_heads=[2, 4], window_size=2),
    "poolformer": image(
        "poolformer",
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_encoder_blocks=2,
        patch_sizes=[3, 3],
        strides=[2, 2],
        padding=[1, 1],
    ),
    "hf-resnet": image("resnet", **CONVS, layer_type="basic"),
    "hf-regnet": image("regnet", **CONVS, groups_width=4),
    "bit": image("bit", **CONVS, num_groups=4),
    "hf-convnext": image("convnext", num_stages=2, **CONVS),
    "convnextv2": image("convnextv2", num_stages=2, **CONVS),
    "hf-mobilenet-v1": image("mobilenet_v1", depth_multiplier=0.25, min_depth=4, example=LARGE),
    "hf-mobilenet-v2": image("mobilenet_v2", depth_multiplier=0.25, example=LARGE),
    "hf-efficientnet": image(
        "efficientnet",
        in_channels=[32, 32],
        out_channels=[32, 64],
        kernel_sizes=[3, 3],
        strides=[1, 2],
        num_block_repeats=[2, 3],
        expand_ratios=[1, 2],
        depthwise_padding=[],
        width_coefficient=0.25,
        depth_coefficient=1.0,
        hidden_dim=320,
        depth_divisor=8,
    ),
    "segformer": image(
        "segformer",
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "pvt": image(
        "pvt",
        num_encoder_blocks=2,
        depths=[2, 2],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "cvt": image(
        "cvt",
        patch_sizes=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        embed_dim=[8, 16],
        num_heads=[2, 4],
        depth=[2, 2],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn"] * 2,
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
    ),
    "data2vec-vision": image("data2vec-vision"),
    "vit-msn": image("vit_msn"),
    "dinov2-registers": image("dinov2_with_registers", mlp_ratio=2, num_register_tokens=2),
    "focalnet": image(
        "focalnet",
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        hidden_sizes=[8, 16],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "wav2vec2": Architecture(
        hf(
            "AudioClassification",
            "wav2vec2",
            TEXT,
            conv_dim=[8, 8],
            conv_stride=[5, 4],
            conv_kernel=[10, 8],
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
        ),
        SOUND,
    ),
    # In the style of torchvision, timm and hand-written code
    "alexnet": torchvision(tv.alexnet),
    "vgg": torchvision(tv.vgg),
    "resnet50": torchvision(tv.resnet50),
    "resnext50": torchvision(tv.resnext50),
    "densenet": torchvision(tv.densenet),
    "squeezenet": torchvision(tv.squeezenet),
    "mobilenet-v1": torchvision(tv.mobilenet_v1),
    "mobilenet-v2": torchvision(tv.mobilenet_v2),
    "efficientnet": torchvision(tv.efficientnet),
    "shufflenet": torchvision(tv.shufflenet),
    "convnext": torchvision(tv.convnext),
    "mixer": torchvision(tv.Mixer),
    "timm-vit": torchvision(tv.ViT),
    "torch-encoder": torchvision(tv.Encoder),
    "parallel-lists": torchvision(tv.ParallelLists),
    "unet": torchvision(tv.UNet),
    "wavenet": torchvision(tv.WaveNet),
    "gru": torchvision(tv.Recurrent),
}

FOUND: dict[str, Found] = {
    "bert": Found((3,), 8, 3),
    "roberta": Found((3,), 8, 3),
    "distilbert": Found((3,), 8, 3),
    "electra": Found((3,), 8, 3),
    "albert": Found((), 5, 0),
    "deberta": Found((3,), 6, 3),
    "deberta-v2": Found((3,), 9, 3),
    "mpnet": Found((3,), 5, 3),
    "roformer": Found((3,), 5, 3),
    "fnet": Found((3,), 5, 3),
    "convbert": Found((3,), 5, 4),
    "nystromformer": Found((3,), 0, 2),
    "squeezebert": Found((), 5, 0),
    "mobilebert": Found((3,), 24, 3),
    "xlnet": Found((3,), 8, 3),
    "modernbert": Found((3,), 8, 2),
    "gpt2": Found((3,), 4, 3),
    "gpt2-lm": Found((3,), 4, 3),
    "gpt-neo": Found((2,), 3, 2),
    "gpt-neox": Found((3,), 7, 3),
    "gptj": Found((3,), 4, 12),
    "opt": Found((3,), 4, 3),
    "bloom": Found((3,), 4, 3),
    "falcon": Found((3,), 4, 8),
    "llama": Found((3,), 7, 3),
    "llama-lm": Found((3,), 7, 3),
    "mistral": Found((3,), 7, 3),
    "qwen2": Found((3,), 7, 3),
    "qwen3": Found((3,), 7, 3),
    "gemma": Found((3,), 7, 3),
    "phi": Found((3,), 7, 12),
    "phi3": Found((3,), 4, 3),
    "stablelm": Found((3,), 4, 3),
    "mpt": Found((3,), 4, 3),
    "mamba-lm": Found((3,), 4, 2),
    "olmo2-lm": Found((3,), 7, 14),
    "t5-lm": Found((3, 3), 9, 6),
    "bart-lm": Found((3, 3), 15, 6),
    "vit": Found((3,), 7, 3),
    "deit": Found((3,), 7, 3),
    "beit": Found((3,), 7, 3),
    "dinov2": Found((3,), 7, 3),
    "swin": Found((2, 2), 10, 4),
    "swinv2": Found((2, 2), 10, 4),
    "poolformer": Found((2, 2), 6, 4),
    "hf-resnet": Found((2, 3), 7, 6),
    "hf-regnet": Found((2, 3), 8, 11),
    "bit": Found((2, 3), 13, 7),
    "hf-convnext": Found((2, 3), 7, 3),
    "convnextv2": Found((2, 3), 7, 9),
    "hf-mobilenet-v1": Found((1, 1, 1, 3, 1, 3, 1, 11, 1, 3), 14, 8),
    "hf-mobilenet-v2": Found((2, 3, 4, 3, 3, 1), 25, 21),
    "hf-efficientnet": Found((2, 3), 12, 9),
    "segformer": Found((2, 2), 8, 3),
    "pvt": Found((2, 2), 5, 3),
    "cvt": Found((2, 2), 6, 6),
    "data2vec-vision": Found((3,), 4, 3),
    "vit-msn": Found((3,), 7, 3),
    "dinov2-registers": Found((3,), 7, 3),
    "focalnet": Found((2, 2), 4, 6),
    "wav2vec2": Found((3,), 8, 3),
    "alexnet": Found((), 4, 0),
    "vgg": Found((), 4, 0),
    "resnet50": Found((2, 3), 13, 6),
    "resnext50": Found((2, 3), 3, 6),
    "densenet": Found((), 6, 0),
    "squeezenet": Found((3,), 4, 4),
    "mobilenet-v1": Found((1, 3), 4, 2),
    "mobilenet-v2": Found((3, 2), 9, 3),
    "efficientnet": Found((3, 3), 16, 10),
    "shufflenet": Found((3,), 3, 6),
    "convnext": Found((2, 3), 8, 3),
    "mixer": Found((3,), 7, 3),
    "timm-vit": Found((3,), 7, 3),
    "torch-encoder": Found((3,), 3, 3),
    "parallel-lists": Found((), 1, 0),
    "unet": Found((), 2, 0),
    "wavenet": Found((), 4, 0),
    "gru": Found((), 1, 0),
}
