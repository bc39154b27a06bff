// Of quantized_prefill_matrix: keys, then values of KEYS tokens are dequantised into threadgroup memory, by all simdgroups of
// the thread group for all of them. A token that no row sees is replaced by the nearest one that some row sees: the mask
// takes its score away, and its values are finite.
constexpr bool TOGETHER = true;
threadgroup T staged[KEYS * (D > DV ? D : DV)];
threadgroup T* const own_staged = staged;
const device uint* const k_pages = k_pool;
const device uint* const v_pages = v_pool;
