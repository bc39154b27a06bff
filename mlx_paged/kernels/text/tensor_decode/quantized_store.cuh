// Of quantized_decode_tensor: a warp's outputs of a round, for the others to see.
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < TILES * 4; i++) {
          const int head = n * 8 + (c * 2 + i % 2) % COLUMNS;
          if (c * 2 / COLUMNS == r * PG / 8 && head >= h0 && head < h0 + HR && head < G) tg_o[warp * HR + head - h0][i / 2 * 8 + r] = acc[n][i / 4][i % 4];
        }
      }
