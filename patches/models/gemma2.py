"""Gemma 2's attention: as Llama's, with a soft cap on the scores, which upstream spells out on the fetched arrays."""

from __future__ import annotations

from . import llama
from .attention import paged_call

adapt = paged_call(llama.project, softcap=lambda module: float(module.attn_logit_softcapping))
