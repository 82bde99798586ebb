"""Configurations of tiny checkpoints, one for every family that the project names, as plain values.

Each is the smallest shape that still shows what sets its family apart: windows shorter than the
tests' prompts, layers that share keys and values, two kinds of layer in one model. ``tiny`` makes
the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EOS = 1
VOCAB = 128
WINDOW = 16

ATTENTION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}

_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}

# The last three layers read keys and values of the second and the third.
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    **ATTENTION,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "final_logit_softcapping": 30.0,
}

# A gated-delta layer and one of attention, twice.
GATED_DELTA: dict[str, Any] = {
    **ATTENTION,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    **GATED_DELTA,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **ATTENTION},
    "mistral": {"model_type": "mistral", **ATTENTION, "head_dim": 16},
    "iquestcoder": {"model_type": "iquestcoder", **ATTENTION},
    # A llama in every word of its config: 24 layers, 16 heads of 128 over 2 key heads, hidden 1536,
    # intermediate 4608, embeddings not tied. The same proportions: heads wider than hidden, too.
    "minicpm5": {
        "model_type": "llama",
        **ATTENTION,
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_attention_heads": 16,
        "head_dim": 8,
        "rope_theta": 5000000.0,
    },
    # The fourth layer has no rotary embedding.
    "smollm3": {"model_type": "smollm3", **ATTENTION, "num_hidden_layers": 4},
    "qwen2": {"model_type": "qwen2", **ATTENTION},
    "qwen3": {"model_type": "qwen3", **ATTENTION, "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **ATTENTION,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3_5": {"model_type": "qwen3_5", "eos_token_id": EOS, "text_config": QWEN3_5},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "eos_token_id": EOS,
        "text_config": {
            **QWEN3_5,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    },
    "gemma": {"model_type": "gemma", **ATTENTION, "head_dim": 16},
    # A cap low enough to bend the scores of a tiny model.
    "gemma2": {
        "model_type": "gemma2",
        **ATTENTION,
        "head_dim": 16,
        "query_pre_attn_scalar": 16.0,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **ATTENTION,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": GEMMA4,
    # The same as released: a text model in a shell for more senses.
    "gemma4": {
        "model_type": "gemma4",
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "text_config": GEMMA4,
    },
    # The larger ones: experts beside the MLP, global layers whose keys are their values.
    "gemma4_text-moe": {
        "model_type": "gemma4_text",
        **ATTENTION,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "phi3": {
        "model_type": "phi3",
        **ATTENTION,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0],
            "short_factor": [1.0] * 8,
        },
    },
    "olmo2": {"model_type": "olmo2", **ATTENTION},
    "glm4": {
        "model_type": "glm4",
        **ATTENTION,
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "granite": {
        "model_type": "granite",
        **ATTENTION,
        "attention_bias": False,
        "mlp_bias": False,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
    },
    "starcoder2": {"model_type": "starcoder2", **ATTENTION, "norm_epsilon": 1e-5},
    # Attention sinks beside windows and experts.
    "gpt_oss": {
        "model_type": "gpt_oss",
        **ATTENTION,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
        },
    },
    "mamba": {"model_type": "mamba", **_MAMBA},
    "mamba2": {
        "model_type": "mamba2",
        **_MAMBA,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 100.0],
        "max_position_embeddings": 4096,
    },
}

# What rows of these cannot do together, mlx-lm's attention does with the arrays themselves.
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **ATTENTION,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "stablelm": {
        "model_type": "stablelm",
        **ATTENTION,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
}


@dataclass(frozen=True, slots=True)
class Draw:
    """How a family's weights are drawn: seed, spread of the embeddings, gains of some norms.

    Families that multiply their embeddings by the root of the width, or read logits off them, only
    repeat tokens when these are as wide as everything else. Where scores are not scaled, queries of
    full length make softmax so sharp that single logits lose half their digits.
    """

    seed: int = 0
    embedding: float = 1.0
    last_norm: float | None = None
    query_norm: float | None = None


DRAWS: dict[str, Draw] = {
    "lfm2": Draw(seed=3),
    "mistral": Draw(seed=1),
    "olmo2": Draw(seed=3),
    "starcoder2": Draw(seed=4),
    "gemma": Draw(embedding=0.05, last_norm=9.0),
    "gemma2": Draw(embedding=0.05, last_norm=9.0),
    "gemma3_text": Draw(embedding=0.125),
    "gemma4_text": Draw(seed=1, embedding=0.125, query_norm=0.4),
    "gemma4": Draw(seed=4, embedding=0.125, query_norm=0.4),
    "gemma4_text-moe": Draw(embedding=0.125, query_norm=0.4),
}
