}

UNROLL
for (int r = 0; r < RT; r++) {
  l[r] += simd_shuffle_xor(l[r], 1);
  l[r] += simd_shuffle_xor(l[r], 2);
  if (part == 0) {
    tg_m[sg * LINES + r * 8 + row] = m[r] * gain;
    tg_l[sg * LINES + r * 8 + row] = l[r];
  }
}
// Join what the simdgroups have, KEYS elements of the values at a time, in the memory of the scores.
UNROLL
for (int v = 0; v < DV / 8; v += KEYS / 8) {
  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    const int column = v + j % (KEYS / 8);
    if (column < DV / 8) {
      simdgroup_store(acc[j / (KEYS / 8) * (DV / 8) + column], own_scores + j / (KEYS / 8) * 8 * KEYS + j % (KEYS / 8) * 8, KEYS);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int item = sg * 32 + lane; item < G * KEYS; item += SG * 32) {
    const int head = item / KEYS;
    const int dim = v * 8 + item % KEYS;
    if (dim < DV) {
      float top = NOTHING;
      UNROLL
      for (int s = 0; s < SG; s++) {
        top = metal::max(top, tg_m[s * LINES + head]);
      }
      float total = 0.0f;
      float o = 0.0f;
      UNROLL
      for (int s = 0; s < SG; s++) {
        const float weight = metal::fast::exp2(tg_m[s * LINES + head] - top);
        total = metal::fma(tg_l[s * LINES + head], weight, total);
        o = metal::fma(scores[s * LINES * KEYS + item], weight, o);
      }
      const int64_t line = line0 + head * q_len;
      if (dim == 0) {
        stats[(line * n_partitions + partition) * 2] = top;
        stats[(line * n_partitions + partition) * 2 + 1] = total;
      }
      if (SINGLE) {
        // The same operations in the same order as merge_partitions with one live partition: equal bits.
        float all = top;
        float denominator = 0.0f;
        if (SINKS) {
          const float sink = static_cast<float>(sinks[kv_head * G + head]) * LOG2E;
          all = metal::max(top, sink);
          denominator = metal::fast::exp2(sink - all);
        }
        const float weight = metal::fast::exp2(top - all);
        denominator = metal::fma(total, weight, denominator);
        o = metal::fma(o, weight, 0.0f) / denominator;
      }
      out[(line * n_partitions + partition) * DV + dim] = static_cast<O>(o);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
