"""A small configuration of every model module of mlx-lm that still exercises it: grouped queries, several layers,
windows and chunks shorter than the prompts. A field that several modules have takes its value from COMMON."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

VOCAB = 128
WINDOW = 12
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}

# Values by field, for every module whose ModelArgs has the field.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_vocab": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64, "hidden_dim": 64, "n_embd": 64, "model_dim": 64, "d_model": 64, "dim_model_base": 64,
    "intermediate_size": 96, "n_inner": 96, "ff_intermediate_size": 96, "ffn_hidden_size": 96,
    "num_hidden_layers": 3, "num_layers": 3, "n_layer": 3, "n_layers": 3, "num_transformer_layers": 3,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2, "num_attention_groups": 2,
    "head_dim": 16, "kv_channels": 16, "hidden_size_per_head": 16, "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "loop_window_size": WINDOW, "attention_chunk_size": WINDOW,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "block_size": 512, "model_max_length": 512,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4, "swa_rope_theta": 1e4, "rotary_emb_base": 10000, "rotary_pct": 0.5, "rotary_dim": 8,
    "partial_rotary_factor": 0.5, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
    "qk_norm": True, "post_norm": False, "tie_word_embeddings": False, "hidden_act": "silu",
    # Mixtures of experts.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "share_expert_dim": 32,
    "expert_ffn_hidden_size": 32, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [], "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "zero_expert_num": 1, "zero_expert_type": "identity",
    # Latent attention.
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16, "attention_method": "MLA",
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    # States.
    "state_size": 8, "ssm_state_size": 8, "conv_kernel": 4, "conv_L_cache": 3, "conv_window": 2, "conv1d_width": 4,
    "conv_bias": False, "use_conv_bias": True, "time_step_rank": 4, "n_groups": 1, "time_step_limit": (0.001, 100.0),
    "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_proj_bias": False, "mamba_conv_bias": True, "group_norm_size": 1, "layer_group_size": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    # Multipliers.
    "logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "scale_depth": 1.4, "scale_emb": 1.0, "logits_soft_cap": 30.0, "gegelu_limit": 20.0,
}  # fmt: skip

_MIXED = [SLIDING, FULL, SLIDING, FULL]
_MIXED_LAYERS = {"num_hidden_layers": 4, "layer_types": _MIXED}
_HYBRID = {"num_hidden_layers": 4, "full_attention_interval": 2}
_QWEN35 = {
    **{key: COMMON[key] for key in COMMON if key not in ("intermediate_size", "partial_rotary_factor", "rope_scaling")},
    **_HYBRID,
    "intermediate_size": 96,
    "num_experts": 0,
    "model_type": "qwen3_5",
    "rope_parameters": {"type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
# With two index heads one score in four is exactly 0, and the choice among equal scores depends on their position.
_INDEXER = {"index_n_heads": 8}
_BY_LAYER_ROPE = {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in (SLIDING, FULL)}
_LLAMA4_SCALE = {
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
    "type": "default",
}
_KIMI_LINEAR = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}

# Tokens of a prompt's chunks (prefill_step_size). Results of two modules depend on it: in plamo3 a query sees one token
# more than the cache keeps if that is in its chunk; phi3small counts blocks of queries from a chunk's end.
CHUNK = 16
CHUNKS = {"plamo3": 128, "phi3small": 128}

# Values by module that COMMON lacks or has wrong.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1},
    "afmoe": _MIXED_LAYERS,
    "baichuan_m1": {"num_hidden_layers": 4, "sliding_window_layers": [1, 3]},
    "bailing_hybrid": {"num_hidden_layers": 4},
    "bailing_moe_linear": {"num_hidden_layers": 4},
    "bailing_moe_v3": {"num_hidden_layers": 4},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": YARN, "num_key_value_heads": 4},
    "deepseek_v32": _INDEXER,
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": "LLLG", "rope_scaling": {"rope_type": "default"}},
    "exaone_moe": {**_MIXED_LAYERS, "is_moe_layer": [False, True, True, True]},
    "gear": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, "conv_mixer", SLIDING]},
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3_text": {"num_hidden_layers": 5, "sliding_window_pattern": 2},
    "gemma3n": {
        "text_config": {
            **COMMON,
            "model_type": "gemma3n",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "num_experts": None,
        "tie_word_embeddings": True,
    },
    "glm_moe_dsa": {
        **_INDEXER,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "num_key_value_heads": 4,
    },
    "gpt_oss": _MIXED_LAYERS,
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_k3": {
        "text_config": {
            **COMMON,
            "num_hidden_layers": 4,
            "linear_attn_config": {**_KIMI_LINEAR, "gate_lower_bound": -5.0},
            "hidden_act": "situ",
            "model_type": "kimi_linear",
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "mla_use_nope": True,
        }
    },
    "kimi_linear": {"num_hidden_layers": 4, "linear_attn_config": _KIMI_LINEAR},
    "kimi_vl": {"text_config": "deepseek_v3"},
    "laguna": _MIXED_LAYERS,
    "lfm2": {
        "num_hidden_layers": 4,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "llama": _MIXED_LAYERS,
    "llama4": {
        "text_config": {
            **COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "floor_scale": 16,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0]},
    "mellum": {**_MIXED_LAYERS, "rope_parameters": _BY_LAYER_ROPE},
    "mimo_v2_flash": {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "head_dim": 24,
    },
    "minicpm3": {
        "rope_scaling": {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    },
    "minimax_m3_vl": {
        "text_config": {
            **COMMON,
            "dense_intermediate_size": 96,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "sparse", "sparse"],
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "moe_layer_freq": None,
            "num_key_value_heads": 2,
        }
    },
    "ministral3": {**_MIXED_LAYERS, "rope_parameters": _LLAMA4_SCALE},
    "mistral3": {"text_config": "ministral3"},
    "mistral4": {"rope_parameters": {**_LLAMA4_SCALE}},
    "muse_glimmer": _MIXED_LAYERS,
    "muse_spark": {
        "text_config": {
            **COMMON,
            **_MIXED_LAYERS,
            "post_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e4},
            "layer_rope_theta": [1e4, 0.0, 1e4, 0.0],
            "final_logit_softcapping": 30.0,
            "output_multiplier": 0.2,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "M", "*", "-"],
        "n_routed_experts": None,
        "num_experts_per_tok": None,
    },
    "olmo3": _MIXED_LAYERS,
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 6],
        "num_kv_heads": [2, 2, 3],
        "ffn_multipliers": [1.0, 1.0, 1.0],
    },
    "phi3small": {
        "vocab_size": 100352,  # it writes to logits from 100,256 on
        "dense_attention_every_n_layers": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "pixtral": {"text_config": "llama"},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "qwen2_vl": {"text_config": "qwen2"},
    "qwen3_5": {"text_config": _QWEN35},
    "qwen3_5_moe": {"text_config": {**_QWEN35, "num_experts": 4, "model_type": "qwen3_5_moe"}},
    "qwen3_next": _HYBRID,
    "qwen3_vl": {"text_config": "qwen3"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe"},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "head_dim": 32,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "spark2_5": {**_MIXED_LAYERS, "rope_parameters": _BY_LAYER_ROPE, "hidden_act": "gelu"},
    "step3p5": {**_MIXED_LAYERS, "moe_layers_enum": "1,2,3"},
}


def modules() -> list[str]:
    """Return the names of mlx-lm's modules that define a model or cannot be imported."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (Exception, SystemExit):
            found.append(module.name)
        else:
            if hasattr(loaded, "Model") and hasattr(loaded, "ModelArgs"):
                found.append(module.name)
    return sorted(found)


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of a module: the part of a config.json that its ModelArgs reads."""
    known = {**COMMON, "model_type": name, **copy.deepcopy(OVERRIDES.get(name, {}))}
    inner = known.get("text_config")
    if isinstance(inner, str):  # another module's
        known["text_config"] = config_of(inner)
    arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    if dataclasses.is_dataclass(arguments):
        names = [field.name for field in dataclasses.fields(arguments)]
    else:
        names = list(inspect.signature(arguments).parameters)
    return {key: known[key] for key in names if key in known}


def build(name: str, seed: int = 0) -> Any:
    """Return a model of the module with random float32 weights.

    Raises:
        Exception, SystemExit: whatever the module raises if it cannot be built.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config_of(name)))
    model.set_dtype(mx.float32)
    model.eval()
    # Initial zeros and ones (sinks, gates, heads) would hide the values that they are multiplied with.
    model.update(tree_map(lambda w: w + 0.02 * mx.random.normal(w.shape), model.parameters()))
    mx.eval(model.parameters())
    return model
