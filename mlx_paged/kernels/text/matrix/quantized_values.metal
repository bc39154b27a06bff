  stage_barrier<TOGETHER>();
  for (int i = TOGETHER ? sg * 32 + lane : lane; i < KEYS * (DV / 8); i += TOGETHER ? 32 * SG : 32) {
    const int position = metal::min(metal::max(step * KEYS + i / (DV / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, VBITS, DV, GS, BS>(v_pages, page, position % BS, i % (DV / 8), own_staged + i * 8);
  }
  stage_barrier<TOGETHER>();
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    Matrix weight[RT];
    UNROLL
    for (int r = 0; r < RT; r++) {
      simdgroup_load(weight[r], own_weights + r * 8 * KEYS + j * 8, KEYS);
    }
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      Matrix values;
      simdgroup_load(values, own_staged + j * 8 * DV + v * 8, DV);
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_multiply_accumulate(acc[r * (DV / 8) + v], weight[r], values, acc[r * (DV / 8) + v]);
      }
    }
  }
