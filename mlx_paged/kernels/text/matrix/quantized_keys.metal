  stage_barrier<TOGETHER>();
  for (int i = TOGETHER ? sg * 32 + lane : lane; i < KEYS * (D / 8); i += TOGETHER ? 32 * SG : 32) {
    const int position = metal::min(metal::max(step * KEYS + i / (D / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, KBITS, D, GS, BS>(k_pages, page, position % BS, i % (D / 8), own_staged + i * 8);
  }
  stage_barrier<TOGETHER>();
  Sums s[RT * (KEYS / 8)];
  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
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
      simdgroup_load(k, own_staged + j * 8 * D + d * 8, D, ulong2(0), true);
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_multiply_accumulate(s[r * (KEYS / 8) + j], query[r], k, s[r * (KEYS / 8) + j]);
      }
    }
  }
