"""Small models of Hugging Face, built from configs; nothing is downloaded."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Inputs = dict[str, Any]
VOCAB, DIM, HIDDEN, BATCH, LENGTH = 37, 32, 48, 4, 9
LAST = VOCAB - 1


@dataclass(frozen=True)
class Family:
    """A model class of transformers, arguments of its config class, and arguments of a forward that returns a loss.

    Args:
        kind: the rows of the table are sorted by it.
        prompt: the arguments that `generate` gets; empty if the model generates nothing.
        no_choice: arguments of the config that send every token to all experts. In bfloat16 rounding decides a choice.
    """

    kind: str
    model: str
    config: Mapping[str, Any]
    inputs: Callable[[], Inputs]
    prompt: tuple[str, ...] = ()
    no_choice: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The model with the same weights at every call, and without random numbers in training."""
        import transformers

        torch.manual_seed(0)
        cls: Any = getattr(transformers, self.model)
        model = cls(cls.config_class(**self.config)).eval()
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or "jitter" in name or isinstance(module, nn.Dropout)):
                    setattr(module, name, 0.0)
        return model


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


IDS = torch.randint(3, LAST, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
PIXELS = _random(BATCH, 3, 32, 32)
IMAGE_AND_IDS = torch.cat([torch.full((BATCH, 16), LAST), IDS], 1)  # 16 patches, each the token LAST


def _text() -> Inputs:
    return {"input_ids": IDS, "labels": IDS}


def _pairs() -> Inputs:
    return {"input_ids": IDS, "labels": IDS[:, :6].clone()}


def _images() -> Inputs:
    return {"pixel_values": PIXELS, "labels": torch.tensor([0, 1, 2, 1])}


TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {**TOKENS, **SMALL, "max_position_embeddings": 64}
GROUPED = {**DENSE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {**HEADS, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 4}
T5 = {**TOKENS, "d_model": DIM, "d_kv": 8, "d_ff": HIDDEN, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {
    **TOKENS, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
VISION = {**SMALL, "image_size": 32, "patch_size": 8}
IDS_ONLY = ("input_ids",)
WITH_IMAGE = ("input_ids", "pixel_values")


def _dense(model: str, config: Mapping[str, Any], **options: Any) -> Family:
    return Family("dense", f"{model}ForCausalLM", {**config, **options}, _text, IDS_ONLY)


ALL_EXPERTS = {"num_experts_per_tok": 4, "topk_group": 2}


def _experts(model: str, config: Mapping[str, Any], **options: Any) -> Family:
    return Family("experts", f"{model}ForCausalLM", {**config, **options}, _text, IDS_ONLY, ALL_EXPERTS)


def _recurrent(model: str, config: Mapping[str, Any], **options: Any) -> Family:
    return Family("state space", f"{model}ForCausalLM", {**config, **options}, _text, IDS_ONLY, ALL_EXPERTS)


def _translator(model: str, config: Mapping[str, Any], **options: Any) -> Family:
    return Family("encoder-decoder", model, {**config, **options}, _pairs, IDS_ONLY)


FAMILIES = {
    "Llama": _dense("Llama", HEADS),
    "GPT-2": Family(
        "dense", "GPT2LMHeadModel", {**TOKENS, "n_embd": DIM, "n_layer": 2, "n_head": 4, "n_positions": 64}, _text,
        IDS_ONLY,
    ),
    "GPT-NeoX": _dense("GPTNeoX", DENSE),
    "OPT": _dense("OPT", DENSE, ffn_dim=HIDDEN, word_embed_proj_dim=DIM),
    "Bloom": _dense("Bloom", TOKENS, hidden_size=DIM, n_layer=2, n_head=4),
    "Falcon": _dense("Falcon", DENSE, num_kv_heads=2, new_decoder_architecture=True),
    "Mistral": _dense("Mistral", HEADS, **WINDOW),
    "Qwen2": _dense("Qwen2", HEADS),
    "Qwen3": _dense("Qwen3", HEADS),
    "Gemma": _dense("Gemma", HEADS),
    "Gemma 2": _dense("Gemma2", HEADS, **WINDOW),
    "Gemma 3": _dense("Gemma3", HEADS, **WINDOW),
    "Phi": _dense("Phi", DENSE),
    "Phi-3": _dense("Phi3", GROUPED),
    "StableLM": _dense("StableLm", GROUPED),
    "OLMo": _dense("Olmo", GROUPED),
    "OLMo 2": _dense("Olmo2", GROUPED),
    "Mixtral": _experts("Mixtral", EXPERTS),
    "Qwen2-MoE": _experts("Qwen2Moe", EXPERTS, shared_expert_intermediate_size=16),
    "Qwen3-MoE": _experts("Qwen3Moe", EXPERTS),
    "GPT-OSS": _experts("GptOss", EXPERTS, **WINDOW),
    "DeepSeek-V3": _experts(
        "DeepseekV3", DENSE, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, n_shared_experts=1,
    ),
    "Switch": Family(
        "experts", "SwitchTransformersForConditionalGeneration",
        {**T5, "num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1,
         "num_sparse_decoder_layers": 1, "expert_capacity": 64},
        _pairs, IDS_ONLY, {"num_experts": 1},
    ),
    "Mamba": _recurrent("Mamba", TOKENS, hidden_size=DIM, state_size=4, num_hidden_layers=2, conv_kernel=3),
    "Mamba-2": _recurrent(
        "Mamba2", TOKENS, hidden_size=DIM, state_size=8, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2,
        chunk_size=4,
    ),
    "RecurrentGemma": _recurrent(
        "RecurrentGemma", GROUPED, num_hidden_layers=3, lru_width=DIM, attention_window_size=4
    ),
    "Jamba": _recurrent(
        "Jamba", EXPERTS, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=4, mamba_d_conv=3, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "Bamba": _recurrent(
        "Bamba", HEADS, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=3,
        mamba_chunk_size=4, attn_layer_indices=[1],
    ),
    "T5": _translator("T5ForConditionalGeneration", T5),
    "BART": _translator("BartForConditionalGeneration", BART),
    "Pegasus": _translator("PegasusForConditionalGeneration", BART),
    "Marian": _translator("MarianMTModel", BART, decoder_vocab_size=VOCAB),
    "BERT": Family("encoder", "BertForMaskedLM", DENSE, _text),
    "RoBERTa": Family("encoder", "RobertaForMaskedLM", DENSE, _text),
    "DeBERTa": Family(
        "encoder", "DebertaV2ForMaskedLM",
        {**DENSE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, _text,
    ),
    "ViT": Family("vision", "ViTForImageClassification", {**VISION, "num_labels": 3}, _images),
    "Swin": Family(
        "vision", "SwinForImageClassification",
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4,
         "num_labels": 3},
        _images,
    ),
    "ConvNeXT": Family(
        "vision", "ConvNextForImageClassification",
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 3, "image_size": 32}, _images,
    ),
    "Whisper": Family(
        "audio", "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
         "decoder_start_token_id": 1},
        lambda: {"input_features": _random(BATCH, 8, 32), "labels": IDS[:, :6].clone()}, ("input_features",),
    ),
    "Wav2Vec2": Family(
        "audio", "Wav2Vec2ForCTC",
        {**TOKENS, **SMALL, "conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 4],
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "mask_time_prob": 0.0, "layerdrop": 0.0},
        lambda: {"input_values": _random(BATCH, 400), "labels": IDS[:, :4].clone()},
    ),
    "CLIP": Family(
        "multimodal", "CLIPModel",
        {"text_config": {**DENSE, "eos_token_id": LAST}, "vision_config": VISION, "projection_dim": 16},
        lambda: {"input_ids": IDS, "pixel_values": PIXELS, "return_loss": True},
    ),
    "LLaVA": Family(
        "multimodal", "LlavaForConditionalGeneration",
        {"vision_config": {**VISION, "model_type": "clip_vision_model"}, "image_token_index": LAST,
         "text_config": {**HEADS, "model_type": "llama"}, "vision_feature_layer": -1},
        lambda: {"input_ids": IMAGE_AND_IDS, "pixel_values": PIXELS, "labels": IMAGE_AND_IDS}, WITH_IMAGE,
    ),
    "BLIP": Family(
        "multimodal", "BlipForConditionalGeneration",
        {"text_config": {**DENSE, "encoder_hidden_size": DIM, "sep_token_id": 2}, "vision_config": VISION},
        lambda: {"input_ids": IDS, "pixel_values": PIXELS, "labels": IDS}, ("pixel_values",),
    ),
}  # fmt: skip
