// Of prefill_matrix: keys and values come from the pool straight into matrices, since 8 tokens never lie in two blocks. Each
// simdgroup works for itself, and waits for no other.
constexpr bool TOGETHER = false;
threadgroup T edges[64 * SG];
const device T* const k_pages = k_pool;
const device T* const v_pages = v_pool;
