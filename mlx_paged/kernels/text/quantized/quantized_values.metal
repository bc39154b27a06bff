    // Back to every lane: what its accumulators shrink by, and the weights of its values.
    UNROLL
    for (int h = 0; h < HG; h++) {
      const float factor = simd_shuffle(shrink[h % R], static_cast<ushort>(lane - sub + SCORE_OWNER(h / R, OWNERS)));
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        acc[h * NV * VEC + i] *= factor;
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        base[h * NV + i] *= factor;
      }
    }
    UNROLL
    for (int u = 0; u < U; u++) {
      float p[HG];
      UNROLL
      for (int h = 0; h < HG; h++) {
        p[h] = simd_shuffle(score[h % R], static_cast<ushort>(lane - sub + SCORE_OWNER((u * HP + h) / R, OWNERS)));
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        const float scale = static_cast<float>(value_scale[u * NV + i]);
        const float bias = static_cast<float>(value_bias[u * NV + i]);
        float weight[HG];
        UNROLL
        for (int h = 0; h < HG; h++) {
          weight[h] = p[h] * scale;
          base[h * NV + i] = metal::fma(p[h], bias, base[h * NV + i]);
        }
        UNROLL
        for (int j = 0; j < VEC; j++) {
          const float code = code_in_place<VBITS>(values[(u * NV + i) * VW + j * VBITS / 32], j * VBITS % 32);
          UNROLL
          for (int h = 0; h < HG; h++) {
            acc[(h * NV + i) * VEC + j] = metal::fma(weight[h], code, acc[(h * NV + i) * VEC + j]);
          }
        }
      }
    }
  }
  UNROLL
  for (int i = 0; i < HG * NV * VEC; i++) {
    acc[i] = metal::fma(acc[i], 1.0f / static_cast<float>(1 << PLACE(i % VEC * VBITS)), base[i / VEC]);
  }

