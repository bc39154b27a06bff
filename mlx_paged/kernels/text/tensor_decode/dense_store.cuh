// Of paged_decode_tensor: a warp's outputs of a round, for the others to see.
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < VT * 16; i++) {
          const int head = n * 8 + c * 2 + i % 2;
          const int eight = i / 16 * 8 + r;  // of dims
          if (head >= h0 && head < h0 + HR && head < G && eight < DV / 8) tg_o[warp * HR + head - h0][(i / 4 % 4 * 2 + i / 2 % 2) * (DV / 8) + eight] = acc[n][i / 16][i / 4 % 4][i % 4];
        }
      }
