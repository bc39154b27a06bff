  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = own_group * 32 + lane; i < KEYS * (DV / 8); i += 32 * SG) {
    const int position = metal::min(metal::max(step * KEYS + i / (DV / 8), lo), hi - 1);
    const int64_t page = static_cast<int64_t>(table[position / BS]) * n_kv + kv_head;
    stage_codes<T, VBITS, DV, GS, BS>(v_pool, page, position % BS, i % (DV / 8), staged + i * 8);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    Matrix weight;
    simdgroup_load(weight, own_weights + j * 8, KEYS);
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      Matrix values;
      simdgroup_load(values, staged + j * 8 * DV + v * 8, DV);
      simdgroup_multiply_accumulate(acc[v], weight, values, acc[v]);
    }
  }
