  const device T* const v_head = v_pages + static_cast<int64_t>(kv_head) * (BS * DV);
  threadgroup T* const edge = edges + sg * 64;
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    const int token = step * KEYS + j * 8;
    if (token + 8 > lo && token < hi) {
      const device T* const value =
          v_head + static_cast<int64_t>(table[token / BS]) * n_kv * (BS * DV) + token % BS * DV;
      // Slots that no row sees may hold anything, and a weight of zero does not make a NaN go away.
      const bool whole = token >= lo && token + 8 <= hi;
      const bool live = token + row >= lo && token + row < hi;
      Matrix weight[RT];
      UNROLL
      for (int r = 0; r < RT; r++) {
        simdgroup_load(weight[r], own_weights + r * 8 * KEYS + j * 8, KEYS);
      }
      UNROLL
      for (int v = 0; v < DV / 8; v++) {
        Matrix values;
        if (whole) {
          simdgroup_load(values, value + v * 8, DV);
        } else {
          const int at = row * DV + v * 8 + part * 2;
          edge[lane * 2] = live ? value[at] : static_cast<T>(0.0f);
          edge[lane * 2 + 1] = live ? value[at + 1] : static_cast<T>(0.0f);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_load(values, edge, 8);
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL
        for (int r = 0; r < RT; r++) {
          simdgroup_multiply_accumulate(acc[r * (DV / 8) + v], weight[r], values, acc[r * (DV / 8) + v]);
        }
      }
    }
  }
