    // Back to every lane: what its accumulators shrink by, and the weights of its values.
    UNROLL
    for (int h = 0; h < HG; h++) {
      const float factor = simd_shuffle(shrink[h % R], static_cast<ushort>(lane - sub + SCORE_OWNER(h / R, OWNERS)));
      UNROLL
      for (int i = 0; i < NV * VEC; i++) {
        acc[h * NV * VEC + i] *= factor;
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
      for (int i = 0; i < NV * VEC; i++) {
        const float value = packet_value<T, VEC>(packets[u * PACKETS + VALUE + i / VEC], i % VEC);
        UNROLL
        for (int h = 0; h < HG; h++) {
          acc[h * NV * VEC + i] = metal::fma(p[h], value, acc[h * NV * VEC + i]);
        }
      }
    }
  }

