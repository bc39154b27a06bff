    float score[NS];
    UNROLL
    for (int u = 0; u < U; u++) {
      UNROLL
      for (int h = 0; h < HP; h++) {
        score[u * HP + h] = 0.0f;
      }
      UNROLL
      for (int i = 0; i < NK; i++) {
        float product[HG];
        UNROLL
        for (int h = 0; h < HG; h++) {
          product[h] = 0.0f;
        }
        UNROLL
        for (int j = 0; j < VEC; j++) {
          const float code = code_in_place<KBITS>(keys[(u * NK + i) * KW + j * KBITS / 32], j * KBITS % 32);
          UNROLL
          for (int h = 0; h < HG; h++) {
            product[h] = metal::fma(query[(h * NK + i) * VEC + j], code, product[h]);
          }
        }
        const float scale = static_cast<float>(key_scale[u * NK + i]);
        const float bias = static_cast<float>(key_bias[u * NK + i]);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(scale, product[h], metal::fma(bias, query_sum[h * NK + i], score[u * HP + h]));
        }
      }
    }
