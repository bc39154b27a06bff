// Each simdgroup dequantises the tokens that it takes, for itself.
constexpr bool TOGETHER = false;
threadgroup T staged[SG * KEYS * (D > DV ? D : DV)];
threadgroup T* const own_staged = staged + simdgroup_index_in_threadgroup * (KEYS * (D > DV ? D : DV));
