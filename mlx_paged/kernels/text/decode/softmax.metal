    UNROLL
    for (int o = 1; o < OWNERS; o *= 2) {
      const bool upper = (sub & o) != 0;
      UNROLL
      for (int i = 0; i < NS / 2; i++) {
        if (i < NS / (2 * o)) {
          const float low = score[i];
          const float high = score[i + NS / (2 * o)];
          score[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, static_cast<ushort>(o));
        }
      }
    }
    UNROLL
    for (int o = OWNERS; o < LPT; o *= 2) {
      score[0] += simd_shuffle_xor(score[0], static_cast<ushort>(o));
    }

    const int own_token = chunk * CHUNK + own_step * TPS + step_token;
    const bool is_visible = own_token >= lo && own_token < hi;
    float shrink[R];
    UNROLL
    for (int j = 0; j < R; j++) {
      const float s = SOFTCAP ? metal::precise::tanh(score[j]) * (params[1] * LOG2E) : score[j];
      score[j] = is_visible ? s : NOTHING;
      float m_new = metal::max(m[j], score[j]);
      UNROLL
      for (int o = 1; o < U; o *= 2) {
        m_new = metal::max(m_new, simd_shuffle_xor(m_new, static_cast<ushort>(o)));
      }
      UNROLL
      for (int o = LPT; o < 32; o *= 2) {
        m_new = metal::max(m_new, simd_shuffle_xor(m_new, static_cast<ushort>(o)));
      }
      shrink[j] = metal::fast::exp2(m[j] - m_new);
      m[j] = m_new;
      score[j] = is_visible ? metal::fast::exp2(score[j] - m_new) : 0.0f;
      l[j] = metal::fma(l[j], shrink[j], score[j]);
    }

