// Of the decode texts for tensor cores: a warp's maxima and sums of a partition, and the rounds of heads whose outputs are joined.
    // Sums over the eight lanes that share heads 2c and 2c + 1, then over the warps.
    if (part > 0) __syncthreads();
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
      for (int i = 0; i < 2; i++) {
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 4);
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 8);
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 16);
        if (r == 0) {
          tg_m[warp * NT * 8 + n * 8 + c * 2 + i] = m[n][i];
          tg_l[warp * NT * 8 + n * 8 + c * 2 + i] = l[n][i];
        }
      }
    }
    UNROLL
    for (int h0 = 0; h0 < G; h0 += HR) {
      if (h0 > 0) __syncthreads();
