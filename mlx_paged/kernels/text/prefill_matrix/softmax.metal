  UNROLL
  for (int j = 0; j < KEYS / 8; j++) {
    simdgroup_store(s[j], own_scores + j * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float x[PART];
  float top = m;
  UNROLL
  for (int i = 0; i < PART; i++) {
    const int token = step * KEYS + part * PART + i;
    x[i] = own_scores[row * KEYS + part * PART + i];
    if (token > own || token < from) {
      x[i] = NOTHING;
    } else if (SOFTCAP) {
      // The hyperbolic tangent, to some 1e-7.
      const float e = metal::fast::exp2(metal::min(x[i] * (params[0] / params[1] * 2.0f * LOG2E), 64.0f));
      x[i] = (1.0f - metal::fast::divide(2.0f, 1.0f + e)) * (params[1] * LOG2E);
    }
    top = metal::max(top, x[i]);
  }
  top = metal::max(top, simd_shuffle_xor(top, 1));
  top = metal::max(top, simd_shuffle_xor(top, 2));
  // A row may see nothing yet: then the difference of its scores to the largest is not 0 but rounding.
  const float base = top == NOTHING ? 0.0f : top * gain;
  const float shrink = metal::fast::exp2(metal::fma(m, gain, -base));
  m = top;
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < PART; i++) {
    const float weight = metal::fast::exp2(metal::fma(x[i], gain, -base));
    sum += weight;
    own_weights[row * KEYS + part * PART + i] = static_cast<T>(weight);
  }
  l = metal::fma(l, shrink, sum);
  if (part == 0) {
    diagonal[row * 9] = shrink;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Most steps have no larger score than those before.
  if (simd_any(shrink != 1.0f)) {
    Sums shrinks, scaled;
    simdgroup_load(shrinks, diagonal, 8);
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      simdgroup_multiply(scaled, shrinks, acc[v]);
      acc[v] = scaled;
    }
  }

