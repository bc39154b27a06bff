  float query_sum[HG * NK];
  float base[HG * NV];  // of the accumulators: the weighted biases
  UNROLL
  for (int i = 0; i < HG * NV; i++) {
    base[i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < HG * NK; i++) {
    query_sum[i] = 0.0f;
    UNROLL
    for (int j = 0; j < VEC; j++) {
      query_sum[i] += query[i * VEC + j];
      query[i * VEC + j] *= 1.0f / static_cast<float>(1 << PLACE(j * KBITS));
    }
  }

