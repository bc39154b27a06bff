  // Scores of KEYS tokens for RT times 8 rows.
  const device T* const k_head = k_pages + static_cast<int64_t>(kv_head) * (BS * D);
  Sums s[RT * (KEYS / 8)];
  const device T* key[KEYS / 8];
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    UNROLL
    for (int r = 0; r < RT; r++) {
      s[r * (KEYS / 8) + j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    // Eight tokens that no row sees are those next to them: the mask takes their scores away.
    const int token = metal::min(metal::max(step * KEYS + j * 8, lo / 8 * 8), (hi - 1) / 8 * 8);
    key[j] = k_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * D) + token % BS * D;
  }
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    Matrix query[RT];
    UNROLL
    for (int r = 0; r < RT; r++) {
      simdgroup_load(query[r], own_queries + r * 8 * D + d * 8, D);
    }
    UNROLL
    for (int j = 0; j < KEYS / 8; j++) {
      Matrix k;
      simdgroup_load(k, key[j] + d * 8, D, ulong2(0), true);
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_multiply_accumulate(s[r * (KEYS / 8) + j], query[r], k, s[r * (KEYS / 8) + j]);
      }
    }
  }
