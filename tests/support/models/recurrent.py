"""Random-weight models with recurrent states: alone (mamba), beside attention in each layer (falcon_h1), alternating
with attention layers (qwen3_next)."""

from typing import Any

import mlx.core as mx
from mlx_lm.models import falcon_h1, mamba, qwen3_next

from tests.support.models.builders import VOCAB

RECURRENT = ("mamba", "falcon_h1", "qwen3_next")


def build_recurrent(kind: str, seed: int = 0) -> Any:
    """Return a model of one of RECURRENT with random float32 weights."""
    mx.random.seed(seed)
    common = {"vocab_size": VOCAB, "model_type": kind}
    if kind == "mamba":
        args = {"hidden_size": 48, "intermediate_size": 96, "state_size": 8, "num_hidden_layers": 2, "conv_kernel": 4}
        args |= {"use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
        model = mamba.Model(mamba.ModelArgs(**common, **args))
    elif kind == "falcon_h1":
        args = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        args |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_head": 16, "mamba_d_ssm": 64}
        args |= {"mamba_d_state": 16, "mamba_n_heads": 4, "lm_head_multiplier": 1.0}
        model = falcon_h1.Model(falcon_h1.ModelArgs(**common, **args))
    else:
        args = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4}
        args |= {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        args |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
        args |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2}
        args |= {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 32, "mlp_only_layers": []}
        args |= {"moe_intermediate_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
        model = qwen3_next.Model(qwen3_next.ModelArgs(**common, **args))
    model.eval()
    mx.eval(model.parameters())
    return model
