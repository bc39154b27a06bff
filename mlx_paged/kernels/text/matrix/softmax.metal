  UNROLL
  for (int j = 0; j < RT * (KEYS / 8); j++) {
    simdgroup_store(s[j], own_scores + j / (KEYS / 8) * 8 * KEYS + j % (KEYS / 8) * 8, KEYS);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  bool grows = false;  // some row has a larger score than before
  UNROLL
  for (int r = 0; r < RT; r++) {
    const int at = (r * 8 + row) * KEYS + part * SHARE;
    float x[SHARE];
    float top = m[r];
    UNROLL
    for (int i = 0; i < SHARE; i++) {
      const int token = step * KEYS + part * SHARE + i;
      x[i] = own_scores[at + i];
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
    const float shrink = metal::fast::exp2(metal::fma(m[r], gain, -base));
    m[r] = top;
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < SHARE; i++) {
      const float weight = metal::fast::exp2(metal::fma(x[i], gain, -base));
      sum += weight;
      own_weights[at + i] = static_cast<T>(weight);
    }
    l[r] = metal::fma(l[r], shrink, sum);
    if (part == 0) {
      diagonal[r * 64 + row * 9] = shrink;
    }
    grows = grows || shrink != 1.0f;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Most steps have no larger score than those before.
  if (simd_any(grows)) {
    UNROLL
    for (int r = 0; r < RT; r++) {
      Sums shrinks, scaled;
      simdgroup_load(shrinks, diagonal + r * 64, 8);
      UNROLL
      for (int v = 0; v < DV / 8; v++) {
        simdgroup_multiply(scaled, shrinks, acc[r * (DV / 8) + v]);
        acc[r * (DV / 8) + v] = scaled;
      }
    }
  }

