// Of the prefill texts for tensor cores: steps over keys and values, and what is stored at the end.
int ids = look_up(first);
if (QS) {
  UNROLL
  for (int i = 0; i < M * (D / 8); i += THREADS) {
    const int item = i + thread_index;
    copies.copy(queries + item / (D / 8) * KW + item % (D / 8) * 8, q + line_of(item / (D / 8)) * D + item % (D / 8) * 8, true);
  }
}
load_keys(first, ids);
if (BUFFERS == 2) load_values(first, ids);
uint query[RT][D / 16][4];
if (!QS) {
  UNROLL
  for (int i = 0; i < RT * 2; i++) {
    const uint* source = reinterpret_cast<const uint*>(q + line_of(opaque(first_line) + i * 8) * D) + c;
    UNROLL
    for (int k = 0; k < D / 16; k++) {
      query[i / 2][k][i % 2] = source[k * 8];
      query[i / 2][k][2 + i % 2] = source[k * 8 + 4];
    }
  }
}

float m[RT * 2], l[RT * 2];  // of rows r and r + 8 of each 16
float acc[RT][DV / 8][4];
UNROLL
for (int i = 0; i < RT * 2; i++) {
  m[i] = NOTHING;
  l[i] = 0.0f;
}
UNROLL
for (int i = 0; i < RT * DV / 2; i++) acc[i / (DV / 2)][i / 4 % (DV / 8)][i % 4] = 0.0f;

for (int step = first; step <= last; step++) {
  // With one buffer, values arrive during the scores and the next keys after them; with two, all of the next step's.
  copies.wait();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int next_ids = step < last ? look_up(step + 1) : 0;
  if (BUFFERS == 1) {
    load_values(step, ids);
  } else if (step < last) {
    load_keys(step + 1, next_ids);
    load_values(step + 1, next_ids);
  }
  const T* const stage = shared + (step - first) % BUFFERS * STAGE;

  float s[RT][KEYS / 8][4];
  UNROLL
  for (int i = 0; i < RT * KEYS / 2; i++) s[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
  const T* const key = stage + (lane / 16 * 8 + lane % 8) * KW + lane / 8 % 2 * 8;
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    if (QS) {
      UNROLL
      for (int i = 0; i < RT; i++) {
        const uint4 a = load_matrices(queries + ((warp * RT + i) * 16 + lane % 16) * KW + lane / 16 * 8 + k * 16);
        query[i][k][0] = a.x;
        query[i][k][1] = a.y;
        query[i][k][2] = a.z;
        query[i][k][3] = a.w;
      }
    }
    UNROLL
    for (int j = 0; j < KEYS / 16; j++) {
      const uint4 b = load_matrices(key + j * 16 * KW + k * 16);
      UNROLL
      for (int i = 0; i < RT; i++) {
        const auto& a = query[i][k];
        mma<T>(s[i][2 * j], a[0], a[1], a[2], a[3], b.x, b.y);
        mma<T>(s[i][2 * j + 1], a[0], a[1], a[2], a[3], b.z, b.w);
      }
    }
  }
  if (BUFFERS == 1) {
    copies.wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step < last) load_keys(step + 1, next_ids);
  }

  if (SOFTCAP) {
    UNROLL
    for (int i = 0; i < RT * KEYS / 2; i++) {
      // The hyperbolic tangent, to some 1e-7.
      float& x = s[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
      const float e = metal::fast::exp2(metal::min(x * (params[0] / params[1] * 2.0f * LOG2E), 64.0f));
      x = (1.0f - metal::fast::divide(2.0f, 1.0f + e)) * (params[1] * LOG2E);
    }
  }
  if (step * KEYS + KEYS - 1 > origin || step * KEYS < first_seen(hi - 1)) {
    UNROLL
    for (int i = 0; i < RT * 2; i++) {
      const int own = origin + metal::min((opaque(first_line) + i * 8) / G, n_tokens - 1) - step * KEYS - c * 2;
      const int from = first_seen(own + step * KEYS + c * 2) - step * KEYS - c * 2;
      UNROLL
      for (int j = 0; j < KEYS / 4; j++) {
        const int token = j / 2 * 8 + j % 2;
        if (token > own || token < from) s[i / 2][j / 2][i % 2 * 2 + j % 2] = NOTHING;
      }
    }
  }
  float shrink[RT * 2];
  UNROLL
  for (int i = 0; i < RT * 2; i++) {
    float top = m[i];
    UNROLL
    for (int j = 0; j < KEYS / 4; j++) top = metal::max(top, s[i / 2][j / 2][i % 2 * 2 + j % 2]);
    top = metal::max(top, simd_shuffle_xor(top, 1));
    top = metal::max(top, simd_shuffle_xor(top, 2));
    // A row may see nothing yet: then the difference of its scores to the largest is not 0 but rounding.
    const float base = top == NOTHING ? 0.0f : top * gain;
    shrink[i] = metal::fast::exp2(metal::fma(m[i], gain, -base));
    m[i] = top;
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < KEYS / 4; j++) {
      float& x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
      x = metal::fast::exp2(metal::fma(x, gain, -base));
      sum += x;
    }
    l[i] = metal::fma(l[i], shrink[i], sum);
  }
  // Most steps have no larger score than those before.
  bool grown = false;
  UNROLL
  for (int i = 0; i < RT * 2; i++) grown = grown || shrink[i] != 1.0f;
  if (simd_any(grown)) {
    UNROLL
    for (int i = 0; i < RT * DV / 2; i++) acc[i / (DV / 2)][i / 4 % (DV / 8)][i % 4] *= shrink[i / (DV / 2) * 2 + i / 2 % 2];
  }

  const T* const value = stage + KEYS * KW + lane % 16 * VW + lane / 16 * 8;
  UNROLL
  for (int u = 0; u < KEYS / 16; u++) {
    uint p[RT][4];
    UNROLL
    for (int i = 0; i < RT * 4; i++) {
      const auto& x = s[i / 4][u * 2 + i % 4 / 2];
      p[i / 4][i % 4] = pack_rounded<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
    }
    UNROLL
    for (int v = 0; v < DV / 16; v++) {
      const uint4 b = load_transposed(value + u * 16 * VW + v * 16);
      UNROLL
      for (int i = 0; i < RT; i++) {
        mma<T>(acc[i][2 * v], p[i][0], p[i][1], p[i][2], p[i][3], b.x, b.y);
        mma<T>(acc[i][2 * v + 1], p[i][0], p[i][1], p[i][2], p[i][3], b.z, b.w);
      }
    }
  }
  ids = next_ids;
}

UNROLL
for (int i = 0; i < RT * 2; i++) {
  const int row = opaque(first_line) + i * 8;
  float sum = l[i] + simd_shuffle_xor(l[i], 1);
  sum += simd_shuffle_xor(sum, 2);
  float scale = metal::fast::divide(1.0f, sum);
  if (SINKS) {
    const float sink = static_cast<float>(sinks[kv_head * G + row % G]) * LOG2E;
    const float top = metal::max(m[i] * gain, sink);
    const float weight = metal::fast::exp2(m[i] * gain - top);
    scale = metal::fast::divide(weight, metal::fma(sum, weight, metal::fast::exp2(sink - top)));
  }
  if (row < n_tokens * G) {
    uint* target = reinterpret_cast<uint*>(out + line_of(row) * DV) + c;
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      const float* x = &acc[i / 2][v][i % 2 * 2];
      target[v * 4] = pack_rounded<T>(x[0] * scale, x[1] * scale);
    }
  }
}
