}

l[0] += simd_shuffle_xor(l[0], 1);
l[0] += simd_shuffle_xor(l[0], 2);
float scale = metal::fast::divide(1.0f, l[0]);
if (SINKS) {
  const float sink = static_cast<float>(sinks[kv_head * G + (first_line + row) % G]) * LOG2E;
  const float top = metal::max(m[0] * gain, sink);
  const float weight = metal::fast::exp2(m[0] * gain - top);
  scale = metal::fast::divide(weight, metal::fma(l[0], weight, metal::fast::exp2(sink - top)));
}
UNROLL
for (int v = 0; v < DV / 8; v += KEYS / 8) {
  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    if (v + j < DV / 8) simdgroup_store(acc[v + j], own_scores + j * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (first_line + row < n_tokens * G) {
    UNROLL
    for (int i = 0; i < SHARE; i++) {
      const int at = v * 8 + part * SHARE + i;
      if (at < DV) out[line * DV + at] = static_cast<T>(own_scores[row * KEYS + part * SHARE + i] * scale);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
