    float score[NS];
    UNROLL
    for (int u = 0; u < U; u++) {
      UNROLL
      for (int h = 0; h < HP; h++) {
        score[u * HP + h] = 0.0f;
      }
      UNROLL
      for (int i = 0; i < NK * VEC; i++) {
        const float key = packet_value<T, VEC>(packets[u * PACKETS + i / VEC], i % VEC);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(query[h * NK * VEC + i], key, score[u * HP + h]);
        }
      }
    }
