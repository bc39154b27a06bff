  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = own_group * 32 + lane; i < KEYS * (D / 8); i += 32 * SG) {
    const int position = metal::min(metal::max(step * KEYS + i / (D / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, KBITS, D, GS, BS>(k_pool, page, position % BS, i % (D / 8), staged + i * 8);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Sums s[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    Matrix query;
    simdgroup_load(query, own_queries + d * 8, D);
    UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      Matrix k;
      simdgroup_load(k, staged + j * 8 * D + d * 8, D, ulong2(0), true);
      simdgroup_multiply_accumulate(s[j], query, k, s[j]);
    }
  }
