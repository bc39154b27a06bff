  const device T* const k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * D);
  Sums s[KEYS / 8];
  const device T* key[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    // Eight tokens that no row sees are those next to them: the mask takes their scores away.
    const int token = metal::min(metal::max(step * KEYS + j * 8, lo / 8 * 8), (hi - 1) / 8 * 8);
    key[j] = k_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * D) + token % BS * D;
  }
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    Matrix query;
    simdgroup_load(query, own_queries + d * 8, D);
    UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      Matrix k;
      simdgroup_load(k, key[j] + d * 8, D, ulong2(0), true);
      simdgroup_multiply_accumulate(s[j], query, k, s[j]);
    }
  }
