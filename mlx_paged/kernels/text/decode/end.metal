  // Add up the tokens that passed side by side in this simdgroup, then the stripes.
  UNROLL
  for (int j = 0; j < R; j++) {
    UNROLL
    for (int o = 1; o < U; o *= 2) {
      l[j] += simd_shuffle_xor(l[j], static_cast<ushort>(o));
    }
    UNROLL
    for (int o = LPT; o < 32; o *= 2) {
      l[j] += simd_shuffle_xor(l[j], static_cast<ushort>(o));
    }
    if (own_step == 0 && step_token == 0 && sub < OWNERS && first_head + j < HG) {
      tg_m[sg * HG + first_head + j] = m[j];
      tg_l[sg * HG + first_head + j] = l[j];
    }
  }
  UNROLL
  for (int i = 0; i < HG * NV * VEC; i++) {
    UNROLL
    for (int o = LPT; o < 32; o *= 2) {
      acc[i] += simd_shuffle_xor(acc[i], static_cast<ushort>(o));
    }
  }
  // HR heads of every simdgroup at a time fit in threadgroup memory.
  UNROLL
  for (int h0 = 0; h0 < HG; h0 += HR) {
    if (h0 > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (int r = 0; r < HR; r++) {
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        const int dim = (i / VEC * LPT + sub) * VEC + i % VEC;
        if (step_token == 0 && dim < DV && h0 + r < HG) {
          tg_o[(sg * HR + r) * DV + dim] = acc[(h0 + r < HG ? h0 + r : 0) * NV * VEC + i];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int item = sg * 32 + lane; item < HS * HR * DV; item += SG * 32) {
      const int dim = item % DV;
      const int r = item / DV % HR;
      const int share = item / (DV * HR);
      const int head = share * HG + h0 + r;
      if (h0 + r < HG && head < G) {
        float top = NOTHING;
        UNROLL
        for (int s = 0; s < STRIPES; s++) {
          top = metal::max(top, tg_m[(s * HS + share) * HG + h0 + r]);
        }
        float total = 0.0f;
        float o = 0.0f;
        UNROLL
        for (int s = 0; s < STRIPES; s++) {
          const float weight = metal::fast::exp2(tg_m[(s * HS + share) * HG + h0 + r] - top);
          total = metal::fma(tg_l[(s * HS + share) * HG + h0 + r], weight, total);
          o = metal::fma(tg_o[((s * HS + share) * HR + r) * DV + dim], weight, o);
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
  }
} else {
  // Nothing visible here: merge_partitions never reads such a partition, a row that sees nothing at all gets zeros.
  for (int item = sg * 32 + lane; item < G * DV; item += SG * 32) {
    const int64_t at = (line0 + item / DV * q_len) * n_partitions + partition;
    if (item % DV == 0) {
      stats[at * 2] = NOTHING;
      stats[at * 2 + 1] = 0.0f;
    }
    if (SINGLE) {
      out[at * DV + item % DV] = static_cast<O>(0.0f);
    }
  }
}
